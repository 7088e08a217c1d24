"""Each supported family against stock transformers: packed logits, gradients, greedy text, log-probs of samples."""

from __future__ import annotations

import json
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, PhimoeConfig, Qwen2MoeConfig
from transformers.models.llama4 import Llama4TextConfig

from areno.engine.model.causal_lm import CausalLM
from areno.engine.model.loading import LoadOptions, load_causal_lm, load_value_model, prepare
from areno.engine.model.packing import PackedPlan
from areno.engine.model.recurrent import SlotStates
from areno.engine.rollout.loop import RolloutLoop
from areno.engine.train.optimizer import MasterAdamW, OptimizerOptions
from areno.engine.train.step import TrainStep
from areno.errors import UnsupportedModelError, UsageError
from areno.loss_fns import grpo_loss_fn
from areno.types import Request, SamplingParams, TrainSequence
from tests.support.examples import some_quick
from tests.support.tiny import FAMILIES, VOCAB, save_tiny_checkpoint, tiny_module

PROMPT_LENGTHS = (5, 29, 1, 14, 33, 18, 70)


def make_loop(model, budget=4096, running=16):
    return RolloutLoop(model, eos_ids=frozenset(), tokenizer=None, budget_tokens=budget, max_running=running)


def random_prompts(seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def random_rows(count=9, seed=0, temperature=0.8):
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        prompt, response = rng.randint(1, 20), rng.randint(1, 40)
        rows.append(
            TrainSequence(
                prompt_mask=[True] * prompt + [False] * response,
                tokens=[rng.randrange(VOCAB) for _ in range(prompt + response)],
                logprobs=[0.0] * prompt + [-4 + rng.random() for _ in range(response)],
                advantages=[0.0] * prompt + [rng.gauss(0, 1)] * response,
                temperature=temperature,
            )
        )
    return rows


def padded_reference(module, rows, temperature=0.8, eps=0.2):
    """Return the GRPO loss of right-padded rows, with stock attention and a mask: nothing from areno."""
    width = max(len(row.tokens) for row in rows)

    def pad(values, fill=0):
        return torch.tensor([[*v, *[fill] * (width - len(v))] for v in values])

    ids = pad([r.tokens for r in rows])
    visible = pad([[1] * len(r.tokens) for r in rows])
    logits = module(input_ids=ids, attention_mask=visible, use_cache=False).logits[:, :-1] / temperature
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    mask = pad([[not p for p in r.prompt_mask] for r in rows])[:, 1:]
    advantage, old = (pad([getattr(r, k) for r in rows], 0.0)[:, 1:] for k in ("advantages", "logprobs"))
    ratio = (logprobs - old).exp()
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - eps, 1 + eps) * advantage)
    return -(objective * mask).sum() / mask.sum()


@pytest.mark.parametrize("family", some_quick(FAMILIES, "llama", "qwen2", "gemma3", "gpt_oss", "qwen3_moe", "qwen3_5"))
def test_greedy_text_equals_generate_alone_and_batched(family):
    reference, loop = tiny_module(family), make_loop(prepare(tiny_module(family), family))
    prompts = random_prompts()
    lengths = [20 + 5 * i for i in range(len(prompts))]
    requests = [
        Request(p, SamplingParams(greedy=True, max_new_tokens=n), [0]) for p, n in zip(prompts, lengths, strict=True)
    ]
    batched = [f.result() for f in loop.submit(requests)]
    alone = [loop.submit([request])[0].result() for request in requests[:2]]
    loop.close()
    for prompt, length, result in zip(prompts, lengths, batched, strict=True):
        ids = torch.tensor([prompt])
        expected = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length)
        assert result.sequences[0].resp_tokens == expected[0, len(prompt) :].tolist()
        assert result.sequences[0].finish_reason == "length"
    assert [r.sequences[0].resp_tokens for r in alone] == [r.sequences[0].resp_tokens for r in batched[:2]]


@pytest.mark.parametrize("family", FAMILIES)
def test_rollout_logprobs_equal_those_of_stock_transformers_and_of_training(family):
    reference, model = tiny_module(family), prepare(tiny_module(family), family)
    loop = make_loop(model)
    for temperature in (1.0, 0.7):
        sampling = SamplingParams(temperature=temperature, max_new_tokens=24)
        results = [f.result() for f in loop.submit([Request(p, sampling, [7, 8]) for p in random_prompts()])]
        rows = [(p, s) for p, r in zip(random_prompts(), results, strict=True) for s in r.sequences]
        plan = PackedPlan([len(p) + len(s.resp_tokens) for p, s in rows])
        tokens = torch.tensor([t for p, s in rows for t in [*p, *s.resp_tokens]])
        with torch.no_grad():
            hidden = model.body(tokens, plan.position_ids, plan)
        gaps = []
        for (prompt, sequence), start, end in zip(rows, plan.starts, plan.starts[1:], strict=False):
            targets = torch.tensor(sequence.resp_tokens)
            with torch.no_grad():
                ids = tokens[None, start:end]
                logits = reference(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
                part = hidden[start + len(prompt) - 1 : end - 1]
                trained = model.logprobs(part, targets, torch.full((len(targets),), temperature))
            stock = (logits / temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
            recorded = torch.tensor(sequence.resp_logprobs)
            assert (stock - recorded).abs().max() < 1e-5
            gaps.append((trained - recorded).abs())
        assert torch.cat(gaps).mean() < 1e-5
    loop.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_gradients_equal_padded_ones_for_every_microbatch_size(family):
    reference, rows = tiny_module(family), random_rows()
    loss = padded_reference(reference, rows)
    loss.backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    # The delta rule accumulates in a different order when chunks differ; its decay gradients are the sums of many terms.
    tolerance = 5e-5 if family == "qwen3_5" else 1e-5
    for mini_bs, checkpointing in ((1, True), (4, False), (9, True)):
        model = prepare(tiny_module(family), family)
        optimizer = MasterAdamW(model.parameters(), OptimizerOptions())
        step = TrainStep(model, optimizer, checkpointing)
        step.set_training(True)
        stats = step.accumulate(rows, partial(grpo_loss_fn, clip_eps=0.2), mini_bs)
        got = {name: m.grad for name, m in zip(optimizer._names, optimizer._masters, strict=True) if m.grad is not None}
        assert abs(stats["loss"] - loss.item()) < 1e-5
        assert set(got) == set(expected)
        for name, gradient in expected.items():
            assert (got[name] - gradient).abs().max() <= tolerance * gradient.abs().max().clamp(min=1e-4), name


def test_no_sequence_sees_its_packed_neighbors():
    for family in ("llama", "gemma3", "gpt_oss", "qwen3_5"):
        model = prepare(tiny_module(family), family)
        generator = torch.Generator().manual_seed(1)
        lengths = (5, 23, 1, 70, 14)
        plan = PackedPlan(lengths)
        first = torch.randint(1, VOCAB, (sum(lengths),), generator=generator)
        other = torch.randint(1, VOCAB, (sum(lengths),), generator=generator)
        start, end = plan.starts[3], plan.starts[4]
        other[start:end] = first[start:end]
        with torch.no_grad():
            a, b = (model.body(ids, plan.position_ids, plan)[start:end] for ids in (first, other))
        assert torch.equal(a, b), family


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_native_attention_equals_fused_attention(family):
    tokens = torch.randint(0, VOCAB, (60,), generator=torch.Generator().manual_seed(3))
    plan = PackedPlan([20, 40])
    with torch.no_grad():
        fused, native = (
            (m := prepare(tiny_module(family), family, backend)).logits(m.body(tokens, plan.position_ids, plan))
            for backend in ("flash", "native")
        )
    assert (fused - native).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["bloom", "mamba"])
def test_a_model_that_ignores_the_plan_is_refused_by_name(family):
    with pytest.raises(UnsupportedModelError, match="ForCausalLM"):
        prepare(tiny_module(family), family)


def test_broken_weights_are_reported_as_such_and_not_as_an_unsupported_architecture():
    module = tiny_module("llama")
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    with pytest.raises(UsageError, match=r"llama: weights are not finite: model\.layers\.1\.mlp") as raised:
        prepare(module, "llama")
    assert not isinstance(raised.value, UnsupportedModelError)
    with torch.no_grad():  # finite weights whose products are not
        module.model.layers[1].mlp.up_proj.weight.fill_(3e38)
    with pytest.raises(UsageError, match=r"computes non-finite numbers in float32; use another checkpoint"):
        prepare(module, "llama")
    with pytest.raises(UsageError, match=r"computes non-finite numbers in bfloat16; use --dtype float32"):
        prepare(module.to(torch.bfloat16), "llama")


def mixture(kind, **config):
    """A tiny random mixture of experts, whose distributions are not flat."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    module = AutoModelForCausalLM.from_config(kind(**sizes, **heads, **config), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return module


EXPERTS = {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "max_window_layers": 2}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (PhimoeConfig, {"num_local_experts": 4, "sliding_window": 16}),
        (Qwen2MoeConfig, {**EXPERTS, "sliding_window": 16, "use_sliding_window": True}),
    ],
)
def test_a_window_that_only_the_masks_of_transformers_apply_is_refused(kind, config):
    with pytest.raises(UnsupportedModelError, match=r"ignores its attention window of 16 tokens.*_embeddings .* to 16"):
        prepare(mixture(kind, **config))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (PhimoeConfig, {"num_local_experts": 4, "sliding_window": 64}),  # the whole context
        (Qwen2MoeConfig, {**EXPERTS, "sliding_window": 16, "use_sliding_window": False}),
        (MixtralConfig, {"num_local_experts": 4, "sliding_window": 16}),
    ],
)
def test_windows_that_are_applied_or_have_no_effect_are_accepted(kind, config):
    reference, model = mixture(kind, **config), prepare(mixture(kind, **config))
    tokens = torch.randint(1, VOCAB, (40,), generator=torch.Generator().manual_seed(3))
    plan = PackedPlan([40])
    with torch.no_grad():
        expected = reference(tokens[None]).logits[0]
        actual = model.logits(model.body(tokens, plan.position_ids, plan))
    assert (actual - expected).abs().max() < 1e-3 * expected.abs().max()


def test_a_model_that_does_not_name_its_body_is_refused():
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(Llama4TextConfig(num_hidden_layers=1, num_local_experts=1))
    with pytest.raises(UnsupportedModelError, match=r"Llama4ForCausalLM has no attribute 'language_model'"):
        prepare(module, "llama4")


@pytest.mark.parametrize("safe", [True, False])
def test_damaged_weight_files_are_reported_as_such(safe, tmp_path):
    save_tiny_checkpoint(tmp_path)
    weights = tmp_path / "model.safetensors"
    if safe:
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        weights.unlink()
        (tmp_path / "pytorch_model.bin").write_bytes(b"not a pickle")
    for load in (load_causal_lm, load_value_model):
        with pytest.raises(UsageError, match=r"--ckpt .*: this folder could not be loaded as a"):
            load(str(tmp_path), LoadOptions(dtype=torch.float32))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"num_hidden_layers": "2"}, "config.json: .*'num_hidden_layers'.* expected int, got str"),
        ({"text_config": 3}, "config.json: text_config is 3, but must be the configuration of a model"),
        ({"model_type": ["llama"]}, "unhashable"),
        ({"quantization_config": 3}, "to_dict"),
        ({"vocab_size": 0}, "IndexError"),
    ],
)
def test_configuration_values_of_a_wrong_type_are_reported_as_such(entry, reason, tmp_path):
    file = save_tiny_checkpoint(tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entry))
    for load in (load_causal_lm, load_value_model):
        with pytest.raises(UsageError, match=rf"--ckpt .*: this folder could not be loaded.*: .*{reason}"):
            load(str(tmp_path), LoadOptions(dtype=torch.float32, dummy=True))


@pytest.mark.parametrize(
    "place", [(AutoModelForCausalLM, "from_pretrained"), (torch.nn.Module, "to"), (CausalLM, "body")]
)
def test_too_little_gpu_memory_is_reported_as_such(monkeypatch, tmp_path, place):
    """Simulates a full GPU while reading, moving or validating a model, with the error that PyTorch raises."""

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 742.00 MiB.")

    monkeypatch.setattr(*place, full)
    save_tiny_checkpoint(tmp_path)
    with pytest.raises(UsageError, match=r"--ckpt .*: the GPU has too little free memory .*742\.00 MiB"):
        load_causal_lm(str(tmp_path), LoadOptions(dtype=torch.float32))


def test_recurrent_states_can_be_read_as_older_versions_of_transformers_do():
    """Versions before 5.21 read the states of ``cache.layers``, and do not read them before a prefill appends to them."""
    layer = SimpleNamespace(
        layer_idx=0,
        conv_dim=6,
        conv_kernel_size=4,
        num_v_heads=2,
        head_k_dim=3,
        head_v_dim=3,
        conv1d=torch.nn.Conv1d(6, 6, 4),
    )
    new, old = SlotStates(3), SlotStates(3)
    generator, slots = torch.Generator().manual_seed(0), torch.tensor([1])
    for length in (5, 2, 1):
        values = torch.randn(1, 6, length, generator=generator)
        state = torch.randn(1, 2, 3, 3, generator=generator)
        for cache, read in ((new, SlotStates.get_conv_state), (old, lambda cache, _: cache.layers[0].conv_states[0])):
            assert cache.at(layer, slots).has_previous_state(0, state_idx=0)
            if length == 1:
                kernel = read(cache, 0)
                kernel.copy_(torch.cat([kernel[..., 1:], values], -1))  # a fused step updates the state in place
            else:
                cache.update_conv_state(values, 0, conv_kernel_size=4)
            cache.update_recurrent_state(state, 0)
        assert torch.equal(old.at(layer, slots).layers[0].recurrent_states[0], state)
    for one, other in zip(new.tensors(), old.tensors(), strict=True):
        assert torch.equal(one, other)
        assert one.any()
