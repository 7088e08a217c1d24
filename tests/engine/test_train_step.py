"""Optimizer steps against torch's own AdamW and hand-made cases."""

from __future__ import annotations

import copy
import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch

from areno.engine.device import read_all
from areno.engine.model import causal_lm
from areno.engine.model.causal_lm import CHUNK_ELEMENTS
from areno.engine.model.chunked_head import rows_of_chunk
from areno.engine.model.loading import prepare
from areno.engine.train import step as step_module
from areno.engine.train.optimizer import MasterAdamW, OptimizerOptions, clip_factor, gradient_norm
from areno.engine.train.schedule import LrSchedule
from areno.engine.train.step import TrainStep
from areno.errors import EngineError, UsageError
from areno.loss_fns import gspo_loss_fn, reduces_over, sft_loss_fn
from areno.types import TrainSequence
from tests.engine.test_model_families import random_rows
from tests.support.tiny import tiny_module


def make_step(dtype=torch.float32, family="llama", **optimizer):
    model = prepare(tiny_module(family, sharpen=1.0).to(dtype), family)
    return TrainStep(model, MasterAdamW(model.parameters(), OptimizerOptions(**optimizer)))


def weights(step):
    return {name: p.detach().clone() for name, p in step.model.parameters()}


@pytest.mark.parametrize("loss_fn", [sft_loss_fn, gspo_loss_fn])
def test_three_microbatch_sizes_give_the_same_weights(loss_fn):
    results = []
    for mini_bs in (1, 4, 9):
        step = make_step(lr=2e-4, eps=1e-6)
        for seed in range(3):
            step.run(random_rows(9, seed), loss_fn, mini_bs)
        results.append(weights(step))
    for other in results[1:]:
        for name, value in results[0].items():
            assert (other[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


def test_accumulation_makes_steps_of_mini_bs_times_accumulation_rows():
    rows = random_rows(8)
    together, apart = (make_step(lr=2e-4, eps=1e-6, lr_warmup_steps=4) for _ in range(2))
    stats = together.run(rows, sft_loss_fn, 2, accumulation=2)
    assert together.optimizer.steps == 2
    first, second = apart.run(rows[:4], sft_loss_fn, 4), apart.run(rows[4:], sft_loss_fn, 4)
    assert stats["loss"] == pytest.approx((first["loss"] + second["loss"]) / 2, rel=1e-5)
    assert first["lr"] < second["lr"] == stats["lr"], "the current learning rate, not a mean"
    for name, value in weights(apart).items():
        assert (weights(together)[name] - value).abs().max() <= 1e-5 * value.abs().max()


def test_an_undeclared_loss_is_weighted_by_tokens_and_a_declared_one_by_its_unit():
    rows = random_rows(5)

    def token_loss(pack, logprobs):
        mask = pack["packed_response_mask"]
        return -(logprobs * mask).sum() / mask.sum()

    @reduces_over("sequence")
    def sequence_loss(pack, logprobs):
        return -logprobs.sum() / pack["packed_num_sequences"]

    for loss_fn in (token_loss, sequence_loss, lambda pack, logprobs: token_loss(pack, logprobs)):
        losses = [make_step().run(rows, loss_fn, mini_bs)["loss"] for mini_bs in (1, 2, 5)]
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_pairs_are_never_split():
    step = make_step()

    @reduces_over("pair")
    def pair_loss(pack, logprobs):
        return -logprobs.sum()

    with pytest.raises(ValueError, match="even"):
        step.run(random_rows(4), pair_loss, 1)
    with pytest.raises(ValueError, match="even"):
        step.run(random_rows(3), pair_loss, 2)


def test_the_step_equals_torch_adamw_with_clipping():
    rows = random_rows(6)
    config = OptimizerOptions(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, grad_clip_norm=0.5, eps=1e-6)
    model = prepare(tiny_module("llama"), "llama")
    step = TrainStep(model, MasterAdamW(model.parameters(), config))
    reference = copy.deepcopy(step)
    adam = torch.optim.AdamW(
        [p for _, p in reference.model.parameters()],
        lr=1e-2,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        eps=1e-6,
        foreach=False,
    )
    for _ in range(3):
        stats = step.run(rows, sft_loss_fn, 2)
        reference.set_training(True)
        adam.zero_grad()
        reference.accumulate(rows, sft_loss_fn, 6)
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in reference.model.parameters()], 0.5)
        adam.step()
        assert stats["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert stats["grad_norm_clipped"] == pytest.approx(min(float(norm), 0.5), rel=1e-4)
    for (name, a), (_, b) in zip(step.model.parameters(), reference.model.parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max(), name


def test_bf16_weights_learn_at_a_rate_that_rounding_would_swallow():
    step = make_step(torch.bfloat16, lr=1e-6)
    before = [m.detach().clone() for m in step.optimizer._masters]
    for seed in range(4):
        step.run(random_rows(4, seed), sft_loss_fn, 2)
    moved = [float((m.detach() - b).abs().max()) for m, b in zip(step.optimizer._masters, before, strict=True)]
    assert min(moved) > 1e-6, "masters move by about lr per step"
    for (_, p), master in zip(step.model.parameters(), step.optimizer._masters, strict=True):
        assert p.dtype == torch.bfloat16
        assert torch.equal(p, master.to(torch.bfloat16))


def test_bf16_gradients_of_microbatches_are_summed_in_fp32():
    rows = random_rows(8)
    gradients = []
    for mini_bs in (1, 8):
        step = make_step(torch.bfloat16)
        step.set_training(True)
        step.accumulate(rows, sft_loss_fn, mini_bs)
        gradients.append(step.optimizer.gradients())
    for one, eight in zip(*gradients, strict=True):
        assert one.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(one.flatten(), eight.flatten(), dim=0) > 0.99


def test_updates_with_non_finite_gradients_are_skipped_and_many_end_the_run():
    step = make_step(lr=1e-2)
    before = weights(step)
    broken = lambda pack, logprobs: logprobs.sum() * float("nan")  # noqa: E731
    stats = step.run(random_rows(3), broken, 2)
    assert stats["update_skipped"] == 1.0
    assert all(torch.equal(before[name], value) for name, value in weights(step).items())
    with pytest.raises(EngineError, match="not finite in 5 updates"):
        for _ in range(5):
            step.run(random_rows(3), broken, 2)


def test_rows_without_a_trainable_token_change_nothing():
    step = make_step(lr=1e-2, weight_decay=0.1)
    before = weights(step)
    row = TrainSequence(prompt_mask=[True] * 4, tokens=[1, 2, 3, 4])
    stats = step.run([row, row], sft_loss_fn, 1)
    assert stats["loss"] == 0.0
    assert stats["update_skipped"] == 1.0
    assert all(torch.equal(before[name], value) for name, value in weights(step).items())


def test_full_logits_of_a_batch_never_exist(monkeypatch):
    rows = random_rows(6)
    whole = make_step()
    whole.set_training(True)
    expected = whole.accumulate(rows, sft_loss_fn, 6)
    monkeypatch.setattr(causal_lm, "CHUNK_ELEMENTS", 10 * whole.model.vocab_size)
    chunked = make_step()
    seen = []
    head = type(chunked.model).own_logits
    monkeypatch.setattr(type(chunked.model), "own_logits", lambda self, h: seen.append(len(h)) or head(self, h))
    chunked.set_training(True)
    got = chunked.accumulate(rows, sft_loss_fn, 6)
    assert max(seen) == 10
    assert len(seen) > 6, "each chunk is recomputed in the backward pass"
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    for a, b in zip(whole.optimizer.gradients(), chunked.optimizer.gradients(), strict=True):
        assert (a - b).abs().max() <= 1e-5 * a.abs().max()


def test_chunks_are_large_enough_for_gpus_and_fit_the_caches_of_cpus():
    assert [rows_of_chunk(vocab, CHUNK_ELEMENTS, "cuda") for vocab in (151_936, 262_144, 32_000)] == [1024, 1024, 4194]
    assert [rows_of_chunk(vocab, CHUNK_ELEMENTS, "cpu") for vocab in (151_936, 32_000, 10**8)] == [55, 262, 1]


def head_gradient(dtype, computes_on, monkeypatch, rows=600):
    """Return log-probs and entropies of many rows, and the gradients of hidden states and output head, in chunks of 8."""
    monkeypatch.setattr(causal_lm, "rows_of_chunk", lambda *_: 8)
    model = prepare(tiny_module("llama", layers=1, hidden=32, heads=2).to(dtype), "llama")
    model.computes_on = computes_on
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 32, generator=generator).to(torch.bfloat16).to(dtype).requires_grad_()
    targets = torch.randint(0, model.vocab_size, (rows,), generator=generator)
    logprobs, spread, _ = model.logprobs_and_entropy(hidden, targets, torch.ones(rows), entropy=True)
    logprobs.sum().backward()
    weight = model.module.get_output_embeddings().weight
    return logprobs.detach(), spread, hidden.grad, weight.grad


def test_the_gradient_of_the_output_head_is_summed_over_chunks_in_fp32(monkeypatch):
    """Autograd would sum in bf16 and round each chunk's contribution against the sum of those before it."""
    exact = head_gradient(torch.float64, "cpu", monkeypatch)
    by_autograd = head_gradient(torch.bfloat16, "cpu", monkeypatch)
    summed = head_gradient(torch.bfloat16, "cuda", monkeypatch)
    for a, b in zip(by_autograd[:3], summed[:3], strict=True):
        assert torch.equal(a, b)
    errors = [float((found[3].double() - exact[3]).norm() / exact[3].norm()) for found in (by_autograd, summed)]
    assert errors[1] < 0.5 * errors[0]
    in_fp32 = [head_gradient(torch.float32, place, monkeypatch) for place in ("cpu", "cuda")]
    for a, b in zip(*in_fp32, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_host_waits_once_for_the_statistics_of_all_passes(monkeypatch):
    """On a GPU every number that is read ends the overlap of host and device."""
    reads = []
    monkeypatch.setattr(step_module, "read_all", lambda values: reads.append(len(values)) or read_all(values))
    step = make_step()
    step.set_training(True)
    stats = {mini_bs: step.accumulate(random_rows(6), gspo_loss_fn, mini_bs) for mini_bs in (6, 1)}
    assert len(reads) == 2
    assert reads[1] > reads[0]
    assert stats[1] == pytest.approx(stats[6], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("step", "expected"),
    [(1, 0.1), (5, 0.5), (10, 1.0), (55, 0.55), (100, 0.1), (500, 0.1)],
)
def test_linear_decay_after_warm_up(step, expected):
    schedule = LrSchedule(lr=1.0, min_lr=0.1, warmup_steps=10, decay_steps=100, style="linear")
    assert schedule.at(step) == pytest.approx(expected)


def test_cosine_decay_and_constant_rate():
    cosine = LrSchedule(lr=1.0, min_lr=0.2, decay_steps=100, style="cosine")
    assert cosine.at(50) == pytest.approx(0.2 + 0.8 * 0.5)
    assert cosine.at(25) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert LrSchedule(lr=0.3, warmup_steps=2).at(1) == pytest.approx(0.15)
    assert LrSchedule(lr=0.3).at(10**6) == 0.3


def test_clipping_scales_to_the_limit():
    gradients = [torch.full((3,), 2.0), torch.full((1,), 2.0)]
    norm = float(gradient_norm(gradients))
    assert norm == pytest.approx(4.0)
    factor = clip_factor(norm, 1.0)
    assert float(gradient_norm([g * factor for g in gradients])) == pytest.approx(1.0, rel=1e-5)
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(norm, None) == 1.0


def test_a_declared_loss_is_split_by_tokens_and_an_undeclared_one_is_not(monkeypatch):
    rows = random_rows(9)
    expected = make_step()
    expected.set_training(True)
    stats = expected.accumulate(rows, gspo_loss_fn, 9)
    monkeypatch.setattr(step_module, "MAX_TOKENS", 60)
    seen = []
    pack = step_module.pack_rows
    monkeypatch.setattr(step_module, "pack_rows", lambda rows, *how: seen.append(rows) or pack(rows, *how))
    split = make_step()
    split.set_training(True)
    assert split.accumulate(rows, gspo_loss_fn, 9)["loss"] == pytest.approx(stats["loss"], abs=1e-6)
    assert len(seen) > 2
    assert all(len(part) == 1 or sum(len(r.tokens) for r in part) <= 60 for part in seen)
    assert [r for part in seen for r in part] == rows
    for a, b in zip(expected.optimizer.gradients(), split.optimizer.gradients(), strict=True):
        assert (a - b).abs().max() <= 1e-5 * a.abs().max().clamp(min=1e-4)
    seen.clear()
    split.accumulate(rows, lambda pack, logprobs: logprobs.sum(), 9)
    assert len(seen) == 1


@pytest.mark.parametrize(
    "name", ["logprobs", "advantages", "returns", "values", "ref_logprobs", "prox_logprobs", "teacher_logprobs"]
)
def test_a_list_that_only_some_rows_have_is_refused(name):
    rows = [TrainSequence([True, False], [3, 4], **{name: [0.0, -1.0]}), TrainSequence([True, False], [5, 6])]
    with pytest.raises(ValueError, match=f"row 1 has no {name}, but other rows have"):
        make_step(lr=1e-3).run(rows, sft_loss_fn, 1)


def test_rows_are_measured_only_if_they_could_be_trained():
    step = make_step()
    rows = random_rows(2)
    with pytest.raises(ValueError, match="row 1 has no logprobs, but other rows have"):
        step.measure([rows[0], dataclasses.replace(rows[1], logprobs=[])], gspo_loss_fn, 2)
    with pytest.raises(ValueError, match=r"measure\(\) needs at least one row"):
        step.measure([], gspo_loss_fn, 2)


@pytest.mark.parametrize(
    ("lacking", "remedy"),
    [
        ("logprobs", r"set TrainSequence\(logprobs=\.\.\.\): .*trainer\.score_logprobs\('actor', token_rows\)"),
        ("advantages", r"set TrainSequence\(advantages=\.\.\.\): areno\.compute_group_advantages"),
    ],
)
def test_rows_without_what_a_loss_reads_are_refused_with_the_remedy(lacking, remedy):
    """Zeros in place of log-probs would mean a policy that was certain of every token."""
    step = make_step()
    rows = [dataclasses.replace(row, **{lacking: []}) for row in random_rows(3)]
    for loss_fn in (gspo_loss_fn, lambda pack, logprobs: (logprobs * pack[f"packed_{lacking}"]).sum()):
        with pytest.raises(ValueError, match=remedy):
            step.run(rows, loss_fn, 2)
    assert math.isfinite(step.run(rows, sft_loss_fn, 2)["loss"])  # which reads neither


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda loss: 1.5, r"my_loss returned 1\.5; return a tensor of one element"),
        (lambda loss: None, "my_loss returned None; return"),
        (lambda loss: torch.stack([loss, loss]), r"my_loss returned a tensor of shape \[2\]; return"),
        (lambda loss: (loss, [("a", 1)]), r"my_loss returned \(a tensor of shape \[\], \[\('a', 1\)\]\); return"),
        (lambda loss: (loss, {}, 1), r"my_loss returned \(a tensor of shape \[\], \{\}, 1\); return"),
        (lambda loss: (loss, {"gap": "x"}), "my_loss returned 'x' as the statistic 'gap'; return a number"),
        (lambda loss: (loss, {"gap": torch.ones(3)}), r"a tensor of shape \[3\] as the statistic 'gap'"),
    ],
)
def test_a_loss_that_returns_something_else_is_refused_by_name(output, message):
    def my_loss(pack, logprobs, scale):
        return output(logprobs.sum() * scale)

    with pytest.raises(UsageError, match=message):
        make_step().run(random_rows(2), partial(my_loss, scale=2.0), 1)


def test_statistics_of_a_loss_may_be_numbers_or_tensors():
    values = {"a": 1, "b": np.float32(2.0), "c": torch.tensor([3.0]), "d": math.inf}
    stats = make_step().run(random_rows(2), lambda pack, logprobs: (logprobs.sum(), values), 2)
    assert [stats[name] for name in values] == [1.0, 2.0, 3.0, math.inf]
