"""AdamW with 8-bit moments against torch's AdamW and the formula in float64, alone, in a model, and in real training."""

from __future__ import annotations

import json

import pytest
import torch

from areno.engine.model.loading import LoadOptions, prepare
from areno.engine.role import load_role
from areno.engine.train.adam_8bit import BLOCK, LEAST_QUANTISED, Adam8bit, Quantised, dynamic_values, state_bytes
from areno.engine.train.optimizer import MasterAdamW, OptimizerOptions, make_adam, take_moments
from areno.engine.train.state_files import SavedState
from areno.engine.train.step import TrainStep
from areno.errors import UsageError
from areno.loss_fns import sft_loss_fn
from areno.types import TrainSequence
from tests.engine.test_model_families import random_rows
from tests.support.optimizer_states import saved
from tests.support.tiny import save_tiny_checkpoint, tiny_module

RATES = {"lr": 1e-6, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
ROOMY = {"hidden": 128, "layers": 2, "heads": 4}  # most of its tensors are large enough for 8 bits


def roomy_model(dtype=torch.float32):
    return prepare(tiny_module("llama", sharpen=1.0, **ROOMY).to(dtype), "llama")


def tensors_in(state):
    if isinstance(state, torch.Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else []
    return [tensor for value in values for tensor in tensors_in(value)]


def noisy_gradients(count, steps, seed=0):
    """Yield gradients of very different magnitudes within a block, half signal and half noise."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (torch.rand(count, generator=generator) * 3 - 6)
    mean = torch.randn(count, generator=generator) * size
    for _ in range(steps):
        yield mean + torch.randn(count, generator=generator) * size


@pytest.mark.parametrize("signed", [True, False])
def test_the_quantisation_error_is_within_the_spacing_of_the_codes(signed):
    numbers = torch.randn(64, BLOCK, generator=torch.Generator().manual_seed(0))
    numbers = numbers if signed else numbers.abs()
    kept = Quantised.zeros(numbers.numel(), torch.device("cpu"), signed)
    kept.write(0, 64, numbers)
    got = kept.read(0, 64)
    values = dynamic_values(signed)
    scaled = numbers / kept.scales[:, None]
    nearest = (scaled[..., None] - values).abs().amin(-1)
    error = (got / kept.scales[:, None] - scaled).abs()
    assert len(values.unique()) == 256
    assert (error <= nearest + 2**-7 * scaled.abs()).all(), "the table sees 7 bits of mantissa"
    largest = numbers.abs().argmax(1, keepdim=True)
    assert torch.equal(got.gather(1, largest), numbers.gather(1, largest)), "the largest of a block is exact"


def test_positive_second_moments_stay_positive():
    numbers = torch.full((1, BLOCK), 1e-12)
    numbers[0, 0] = 1.0
    kept = Quantised.zeros(BLOCK, torch.device("cpu"), signed=False)
    kept.write(0, 1, numbers)
    assert (kept.read(0, 1) > 0).all()


@pytest.mark.parametrize("count", [LEAST_QUANTISED, LEAST_QUANTISED + 77, 70_000])
def test_updates_at_learning_rate_1e_6_follow_adamw(count):
    start = torch.randn(count, generator=torch.Generator().manual_seed(1)) * 0.02
    ours, ideal = (torch.nn.Parameter(start.clone()) for _ in range(2))
    rules = [make_adam([ours], OptimizerOptions(**RATES, adam_8bit=True)), torch.optim.AdamW([ideal], **RATES)]
    for gradient in noisy_gradients(count, 100):
        ours.grad, ideal.grad = gradient, gradient.clone()
        for rule in rules:
            rule.step()
    moved, wanted = (ours - start).detach().double(), (ideal - start).detach().double()
    assert float((moved != 0).float().mean()) >= 0.999 * float((wanted != 0).float().mean())
    assert float(moved.abs().mean() / wanted.abs().mean()) == pytest.approx(1.0, abs=0.04)
    assert float((moved - wanted).norm() / wanted.norm()) < 0.12
    assert float(moved.abs().max()) < 1.6 * float(wanted.abs().max()), "no weight jumps"


def test_small_tensors_are_updated_by_the_formula():
    start = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ours, w = torch.nn.Parameter(start.float()), start.clone()
    rule = Adam8bit([ours], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for step, gradient in enumerate(noisy_gradients(50, 20), start=1):
        ours.grad = gradient
        rule.step()
        g = gradient.double()
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        w = w * (1 - 1e-2 * 0.1) - 1e-2 * (m / (1 - 0.9**step)) / ((v / (1 - 0.99**step)).sqrt() + 1e-8)
    assert torch.allclose(ours.detach().double(), w, rtol=1e-5, atol=1e-6)


def test_flat_shards_get_the_same_updates_as_the_whole_tensor():
    whole = torch.randn(4 * 4096, generator=torch.Generator().manual_seed(3))
    one = torch.nn.Parameter(whole.view(128, 128).clone())
    parts = [torch.nn.Parameter(part.clone()) for part in whole.chunk(2)]
    config = OptimizerOptions(lr=1e-3, adam_8bit=True)
    rules = [make_adam([one], config), make_adam(parts, config)]
    for gradient in noisy_gradients(len(whole), 5):
        one.grad = gradient.view(128, 128)
        for part, own in zip(parts, gradient.chunk(2), strict=True):
            part.grad = own
        for rule in rules:
            rule.step()
    assert torch.equal(one.detach().view(-1), torch.cat([part.detach() for part in parts]))


def test_the_states_take_at_most_three_tenths_of_fp32_states():
    sizes = {}
    for low in (True, False):
        model = roomy_model()
        optimizer = MasterAdamW(model.parameters(), OptimizerOptions(adam_8bit=low))
        TrainStep(model, optimizer).run(random_rows(4), sft_loss_fn, 2)
        sizes[low] = sum(part.values.numel() * part.values.element_size() for part in optimizer.state_parts())
        assert optimizer.state_bytes() == sizes[low]
    assert sizes[True] <= 0.3 * sizes[False]


def test_the_checkpoint_size_counts_8_bit_and_fp32_states(tmp_path):
    path = str(save_tiny_checkpoint(tmp_path / "model", **ROOMY))
    options = LoadOptions(dtype=torch.float32)
    roles = [
        load_role("actor", path, "policy", options, OptimizerOptions(adam_8bit=low), False) for low in (True, False)
    ]
    counts = [p.numel() for _, p in roles[0].model.parameters()]
    weights = 4 * sum(counts)
    assert [role.checkpoint_bytes() for role in roles] == [weights + sum(map(state_bytes, counts)), 3 * weights]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("low", [True, False])
def test_a_saved_optimizer_resumes_bit_for_bit(dtype, low, tmp_path):
    config = OptimizerOptions(lr=1e-3, lr_decay_style="cosine", lr_decay_steps=10, adam_8bit=low)
    whole, first = (TrainStep(m, MasterAdamW(m.parameters(), config)) for m in (roomy_model(dtype) for _ in "ab"))
    for seed in range(4):
        whole.run(random_rows(4, seed), sft_loss_fn, 2)
    for seed in range(2):
        first.run(random_rows(4, seed), sft_loss_fn, 2)
    saved(first.optimizer, tmp_path / "optimizer")
    model = roomy_model(dtype)
    model.module.load_state_dict(first.model.module.state_dict())
    second = TrainStep(model, MasterAdamW(model.parameters(), config))
    second.optimizer.load_state(SavedState(tmp_path / "optimizer"))
    for seed in range(2, 4):
        second.run(random_rows(4, seed), sft_loss_fn, 2)
    for (name, a), (_, b) in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_states_of_another_precision_are_refused():
    model = roomy_model()
    low, full = (MasterAdamW(model.parameters(), OptimizerOptions(adam_8bit=one)) for one in (True, False))
    with pytest.raises(ValueError, match="--adam-8bit"):
        low.load_state(SavedState(saved(full)))
    with pytest.raises(ValueError, match="--adam-8bit"):
        full.load_state(SavedState(saved(low)))


@pytest.mark.parametrize("low", [True, False])
def test_allocating_moments_in_advance_changes_no_step(low):
    steps = []
    for ahead in (True, False):
        model = roomy_model()
        optimizer = MasterAdamW(model.parameters(), OptimizerOptions(lr=1e-3, adam_8bit=low))
        if ahead:
            optimizer.allocate()
        steps.append(TrainStep(model, optimizer))
        for seed in range(2):
            steps[-1].run(random_rows(4, seed), sft_loss_fn, 2)
    for (name, a), (_, b) in zip(steps[0].model.parameters(), steps[1].model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_existing_moments_are_not_replaced():
    parameter = torch.nn.Parameter(torch.zeros(5000))
    rule = make_adam([parameter], OptimizerOptions())
    parameter.grad = torch.ones(5000)
    rule.step()
    before = rule.state[parameter]["exp_avg"].clone()
    take_moments(rule)
    assert torch.equal(rule.state[parameter]["exp_avg"], before)


def test_as_many_bf16_weights_change_as_with_fp32_moments():
    models = [roomy_model(torch.bfloat16) for _ in range(2)]
    before = {name: p.detach().clone() for name, p in models[0].parameters()}
    for model, low in zip(models, (True, False), strict=True):
        step = TrainStep(model, MasterAdamW(model.parameters(), OptimizerOptions(**RATES, adam_8bit=low)))
        for seed in range(30):
            step.run(random_rows(4, seed), sft_loss_fn, 4)
    shares = []
    for model in models:
        changed = sum(int((p != before[name]).sum()) for name, p in model.parameters())
        shares.append(changed / sum(p.numel() for p in before.values()))
    assert shares[1] > 0.005, "at this rate bf16 weights without a master would hardly move"
    assert shares[0] == pytest.approx(shares[1], rel=0.05)


def test_offloading_from_a_cpu_is_refused(tmp_path):
    path = str(save_tiny_checkpoint(tmp_path / "model"))
    with pytest.raises(UsageError, match="--offload-optimizer has no effect for role 'actor', which is on a CPU"):
        load_role("actor", path, "policy", LoadOptions(dtype=torch.float32), OptimizerOptions(offload=True), False)


def test_offloading_activations_from_a_cpu_is_refused(tmp_path):
    path = str(save_tiny_checkpoint(tmp_path / "model"))
    options = LoadOptions(dtype=torch.float32)
    with pytest.raises(UsageError, match="--offload-activations has no effect for role 'actor', which is on a CPU"):
        load_role("actor", path, "policy", options, OptimizerOptions(), True, offload_activations=True)


def gsm8k_rows(folder, tokenizer, count):
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    rows = []
    for row in map(json.loads, lines):
        question, answer = (tokenizer.encode(str(row[key])) for key in ("question", "answer"))
        tokens = [*question, *answer][:192]
        mask = [index < len(question) for index in range(len(tokens))]
        zeros = [0.0] * len(tokens)
        if not all(mask):
            rows.append(TrainSequence(prompt_mask=mask, tokens=tokens, logprobs=zeros, advantages=zeros))
    return rows


@pytest.mark.long
def test_the_loss_on_real_text_follows_fp32_states_for_200_steps(gsm8k, tmp_path):
    from transformers import AutoTokenizer

    texts = (gsm8k / "train.jsonl").read_text(encoding="utf-8").splitlines()[:2000]
    path = save_tiny_checkpoint(
        tmp_path / "model", "qwen3", texts=texts, vocab=2000, **(ROOMY | {"layers": 4, "hidden": 192})
    )
    rows = gsm8k_rows(gsm8k, AutoTokenizer.from_pretrained(path), 1700)
    curves = []
    for low in (True, False):
        config = OptimizerOptions(lr=1e-3, lr_warmup_steps=10, betas=(0.9, 0.999), grad_clip_norm=1.0, adam_8bit=low)
        role = load_role("actor", str(path), "policy", LoadOptions(dtype=torch.float32), config, False)
        losses = [role.training.run(rows[8 * i : 8 * i + 8], sft_loss_fn, 8)["loss"] for i in range(200)]
        curves.append(torch.tensor(losses).view(10, 20).mean(1))
    gap = ((curves[0] - curves[1]).abs() / curves[1]).max()
    print("mean losses of 20 steps each:", curves, "largest gap:", float(gap))
    assert curves[1][-1] < 0.8 * curves[1][0], "it learns"
    assert gap < 0.02
