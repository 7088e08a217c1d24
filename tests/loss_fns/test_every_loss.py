"""Properties of every loss: gradients, microbatches, masks, precision, and numbers far outside the usual range."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areno.loss_fns import (
    Count,
    Mean,
    Range,
    Spread,
    TokenFlags,
    dpo_loss_fn,
    grpo_loss_fn,
    gspo_loss_fn,
    ppo_loss_fn,
    reduces_over,
    reduction_of,
    reward_model_loss_fn,
    sft_loss_fn,
    value_loss_fn,
)
from areno.loss_fns.loss_interface import reads_bounds, reads_entropy
from tests.loss_fns.packs import CASES, QUICK, Batch, Case, batches, make_batch, slopes, value_of
from tests.support.examples import examples

every_loss = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def gradient_of(case: Case, batch: Batch, weight: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, dict]:
    x = batch.of(case).detach().clone().requires_grad_(True)
    loss, metrics = case.loss_fn(batch.pack, x)
    (loss * weight).backward()
    return loss.detach(), x.grad, metrics


@pytest.mark.parametrize("case", [case for case in CASES if not case.frozen], ids=lambda case: case.name)
@settings(QUICK, max_examples=examples(20))
@given(batch=batches(shifts=(0.05, 0.5, 2.0)))
def test_gradients_equal_finite_differences(case, batch):
    _, gradient, _ = gradient_of(case, batch)
    expected = slopes(lambda x: case.loss_fn(batch.pack, x)[0], batch.of(case))
    assert gradient.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def units_of(case: Case, batch: Batch) -> int:
    unit = reduction_of(case.loss_fn)
    if unit == "token":
        return int(batch.pack["packed_response_mask"].sum())
    return batch.pack["packed_num_sequences"] // (2 if unit == "pair" else 1)


def added(parts: list[dict]) -> dict:
    """Statistics of microbatches, added up as the engine does."""
    sums = {}
    for name, first in parts[0].items():
        if isinstance(first, TokenFlags):
            sums[name] = TokenFlags(torch.cat([part[name].values for part in parts]))
            continue
        fields = {Mean: ("total", "count"), Spread: ("total", "square", "count"), Count: ("total",)}
        added = [
            sum(getattr(part[name], field) for part in parts) for field in fields.get(type(first), ("total", "count"))
        ]
        if isinstance(first, Range):
            added += [min(part[name].minimum for part in parts), max(part[name].maximum for part in parts)]
        sums[name] = type(first)(*added)
    return sums


@every_loss
@QUICK
@given(batch=batches(), cuts=st.sets(st.integers(0, 3)))
def test_microbatches_weighted_by_their_units_give_the_loss_and_gradient_of_the_whole_batch(case, batch, cuts):
    sequences = batch.pack["packed_num_sequences"]
    per_unit = 2 if reduction_of(case.loss_fn) == "pair" else 1
    edges = sorted({0, sequences, *(min(cut * per_unit, sequences) for cut in cuts)})
    whole, gradient, metrics = gradient_of(case, batch)
    total, loss, pieces, statistics = units_of(case, batch), 0.0, [], []
    for first, last in pairwise(edges):
        part = batch.part(first, last)
        weight = units_of(case, part) / max(total, 1)
        part_loss, part_gradient, part_metrics = gradient_of(case, part, weight)
        loss += float(part_loss) * weight
        pieces.append(part_gradient)
        statistics.append(part_metrics)
    assert loss == pytest.approx(float(whole), rel=1e-9, abs=1e-12)
    assert torch.cat(pieces).tolist() == pytest.approx(gradient.tolist(), rel=1e-9, abs=1e-12)
    for name, summed in added(statistics).items():
        assert value_of(summed) == pytest.approx(value_of(metrics[name]), rel=1e-9, abs=1e-9), name
        if isinstance(summed, Spread):
            assert float(summed.square) == pytest.approx(float(metrics[name].square), rel=1e-9)
        if isinstance(summed, Range):
            assert float(summed.minimum) == pytest.approx(float(metrics[name].minimum), rel=1e-9, abs=1e-9)
            assert float(summed.maximum) == pytest.approx(float(metrics[name].maximum), rel=1e-9, abs=1e-9)


def assert_finite(case: Case, batch: Batch) -> None:
    loss, gradient, metrics = gradient_of(case, batch)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    for name, statistic in metrics.items():
        assert isinstance(statistic, TokenFlags) or torch.isfinite(torch.as_tensor(statistic.total)), name


@every_loss
@pytest.mark.parametrize("lengths", [[6, 6], [1, 1], [1, 0], [0, 0]])
def test_extreme_ratios_empty_masks_and_single_tokens_stay_finite(case, lengths):
    for gap in (0.0, 25.0, -25.0, 100.0, -100.0, 1e4, -1e4):
        for mask_share in (1.0, 0.0):
            batch = make_batch(lengths, mask_share=mask_share).cast(torch.float32)
            mask = batch.pack["packed_response_mask"]
            batch.logprobs = torch.where(mask, batch.pack["packed_logprobs"] + gap, 0.0)
            batch.scores = batch.scores + torch.tensor([gap, -gap])
            assert_finite(case, batch)


@every_loss
def test_losses_stay_finite_with_a_distant_reference_or_critic(case):
    for far in ("packed_ref_logprobs", "packed_values", "packed_returns"):
        for gap in (1e4, -1e4):
            batch = make_batch([6, 6], mask_share=1.0).cast(torch.float32)
            batch.pack[far] = batch.pack[far] + gap
            assert_finite(case, batch)


@pytest.mark.parametrize("case", [case for case in CASES if not case.per_sequence], ids=lambda case: case.name)
def test_without_response_tokens_there_is_nothing_to_learn(case):
    loss, gradient, _ = gradient_of(case, make_batch([4, 1], mask_share=0.0))
    assert gradient.tolist() == [0.0] * 5
    assert float(loss) == 0.0 or reduction_of(case.loss_fn) == "pair"


@every_loss
def test_masked_tokens_have_no_influence_even_if_nan_or_infinite(case):
    batch = make_batch([6, 6, 5, 2], seed=3)
    mask = batch.pack["packed_response_mask"]
    clean, clean_gradient, clean_metrics = gradient_of(case, batch)
    for poison in (torch.nan, torch.inf, -torch.inf):
        for key, value in list(batch.pack.items()):
            if key.startswith("packed_") and getattr(value, "dtype", None) == torch.float64:
                batch.pack[key] = torch.where(mask, value, poison)
        batch.logprobs = torch.where(mask, batch.logprobs, poison)
        loss, gradient, metrics = gradient_of(case, batch)
        assert float(loss) == float(clean)
        assert torch.equal(gradient, clean_gradient)
        assert {name: value_of(m) for name, m in metrics.items()} == {
            name: value_of(m) for name, m in clean_metrics.items()
        }


@every_loss
def test_half_precision_inputs_are_computed_in_single_precision(case):
    half = make_batch([6, 6, 5, 2], seed=3).cast(torch.bfloat16)
    loss, gradient, _ = gradient_of(case, half)
    raised, _, _ = gradient_of(case, half.cast(torch.float32))
    assert (loss.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
    assert float(loss) == float(raised)


@every_loss
def test_single_precision_is_close_to_double(case):
    batch = make_batch([6, 6, 5, 2], seed=3)
    single = batch.cast(torch.float32)
    assert single.of(case).dtype == torch.float32
    assert float(gradient_of(case, single)[0]) == pytest.approx(float(gradient_of(case, batch)[0]), rel=1e-5)


@pytest.mark.parametrize("loss_fn", [grpo_loss_fn, gspo_loss_fn, ppo_loss_fn])
def test_zero_advantages_give_no_gradient(loss_fn):
    batch = make_batch([6, 6], equal_advantages=True, mask_share=1.0)
    loss, gradient, _ = gradient_of(Case("", loss_fn), batch)
    assert float(loss) == 0.0
    assert gradient.tolist() == [0.0] * 12


def test_each_loss_declares_what_it_averages_over():
    assert reduction_of(sft_loss_fn) == reduction_of(ppo_loss_fn) == reduction_of(value_loss_fn) == "token"
    assert reduction_of(dpo_loss_fn) == reduction_of(reward_model_loss_fn) == "pair"
    assert reduction_of(partial(partial(gspo_loss_fn, clip_eps=0.1))) == "sequence"
    assert reduction_of(lambda pack, logprobs: logprobs.sum()) == "token"
    assert reduction_of(reduces_over("pair")(lambda pack, logprobs: logprobs.sum())) == "pair"


def test_the_unit_of_grpo_follows_its_mean_through_nested_partials():
    assert reduction_of(grpo_loss_fn) == reduction_of(partial(grpo_loss_fn, loss_mean="token")) == "token"
    assert reduction_of(partial(partial(grpo_loss_fn, loss_mean="sequence"), clip_eps=0.1)) == "sequence"
    assert reduction_of(partial(partial(grpo_loss_fn, loss_mean="token"), loss_mean="dr_grpo")) == "sequence"
    # Python merges partials of partials, except around one that carries an attribute.
    tagged = partial(grpo_loss_fn, loss_mean="token")
    tagged.name = "mine"
    assert reduction_of(partial(tagged, loss_mean="sequence")) == "sequence"


def test_only_policy_losses_ask_for_the_entropy():
    asking = {case.name.split("-")[0] for case in CASES if reads_entropy(case.loss_fn)}
    assert asking == {"grpo", "dr_grpo", "gspo", "gmpo", "ppo", "family"}
    assert {case.name.split("-")[0] for case in CASES if reads_bounds(case.loss_fn)} == {"family"}
