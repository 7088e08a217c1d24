"""DPO and the reward-model loss against their formulas, their statistics, and the inputs that they refuse."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areno.loss_fns import dpo_loss_fn, reward_model_loss_fn
from tests.loss_fns import written_out
from tests.loss_fns.packs import QUICK, batches, make_batch, value_of

EXACT = {"rel": 1e-6, "abs": 1e-9}


@QUICK
@given(
    batch=batches(),
    beta=st.sampled_from([0.05, 0.5]),
    smoothing=st.sampled_from([0.0, 0.2]),
    normalized=st.booleans(),
)
@pytest.mark.parametrize("shape", ["sigmoid", "ipo", "hinge"])
def test_dpo_equals_its_formula(shape, batch, beta, smoothing, normalized):
    loss, metrics = dpo_loss_fn(
        batch.pack,
        batch.logprobs,
        beta,
        label_smoothing=smoothing,
        loss_type=shape,
        length_normalized=normalized,
    )
    expected = written_out.dpo(batch.rows, beta, smoothing, shape, normalized)
    assert float(loss) == pytest.approx(expected, **EXACT)
    assert value_of(metrics["dpo_loss"]) == pytest.approx(expected, **EXACT)
    assert value_of(metrics["total_loss"]) == pytest.approx(expected, **EXACT)


@QUICK
@given(batch=batches(), normalized=st.booleans())
def test_dpo_statistics_describe_the_pairs(batch, normalized):
    _, metrics = dpo_loss_fn(batch.pack, batch.logprobs, 0.3, length_normalized=normalized)
    rows = batch.rows
    pairs = written_out.dpo_deltas(rows, normalized)
    # Equal log-ratios are not a win; a difference that is only a rounding error may count either way.
    clear = [c - r for c, r in pairs if c == r or abs(c - r) > 1e-9]
    expected = {
        "dpo_margin": written_out.mean([0.3 * (c - r) for c, r in pairs]),
        "dpo_reward_margin": written_out.mean([0.3 * (c - r) for c, r in pairs]),
        "dpo_chosen_reward": written_out.mean([0.3 * c for c, _ in pairs]),
        "dpo_rejected_reward": written_out.mean([0.3 * r for _, r in pairs]),
        "dpo_response_len": written_out.mean([float(len(row)) for row in rows]),
    }
    assert {name: value_of(metrics[name]) for name in expected} == pytest.approx(expected, **EXACT)
    if len(clear) == len(pairs):
        assert value_of(metrics["dpo_accuracy"]) == written_out.mean([float(delta > 0) for delta in clear])


def test_at_the_reference_the_loss_of_every_pair_is_log_two_and_pushes_its_answers_apart():
    batch = make_batch([4, 6], mask_share=1.0)
    batch.pack["packed_ref_logprobs"] = batch.logprobs.clone()
    logprobs = batch.logprobs.clone().requires_grad_(True)
    loss, _ = dpo_loss_fn(batch.pack, logprobs, 0.1)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(math.log(2))
    assert logprobs.grad.tolist() == pytest.approx([-0.05] * 4 + [0.05] * 6)


def test_ipo_is_minimal_at_its_target_margin():
    batch = make_batch([2, 2], mask_share=1.0)
    batch.pack["packed_ref_logprobs"] = torch.zeros(4, dtype=torch.float64)
    at_target = torch.tensor([-1.0, -1.0, -3.5, -3.5], dtype=torch.float64, requires_grad=True)
    loss, _ = dpo_loss_fn(batch.pack, at_target, 0.1, loss_type="ipo")
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert at_target.grad.tolist() == [0.0] * 4


def test_label_smoothing_keeps_the_margin_of_a_confident_pair_from_growing_forever():
    batch = make_batch([3, 3], mask_share=1.0)
    batch.pack["packed_ref_logprobs"] = torch.zeros(6, dtype=torch.float64)
    sure = torch.tensor([0.0] * 3 + [-60.0] * 3, dtype=torch.float64)
    slopes = []
    for smoothing in (0.0, 0.1):
        logprobs = sure.clone().requires_grad_(True)
        dpo_loss_fn(batch.pack, logprobs, 0.1, label_smoothing=smoothing)[0].backward()
        slopes.append(float(logprobs.grad[0]))
    assert slopes[0] < 0 < slopes[1]


def test_length_normalization_removes_the_effect_of_length():
    batch = make_batch([2, 8], mask_share=1.0)
    batch.pack["packed_ref_logprobs"] = torch.full((10,), -1.0, dtype=torch.float64)
    logprobs = torch.full((10,), -1.5, dtype=torch.float64)
    assert value_of(dpo_loss_fn(batch.pack, logprobs, 1.0)[1]["dpo_margin"]) == pytest.approx(3.0)
    metrics = dpo_loss_fn(batch.pack, logprobs, 1.0, length_normalized=True)[1]
    assert value_of(metrics["dpo_margin"]) == pytest.approx(0.0)


def test_margins_of_long_answers_stay_accurate_in_single_precision():
    batch = make_batch([20_000, 20_000], mask_share=1.0, shift=1e-4)
    exact = float(dpo_loss_fn(batch.pack, batch.logprobs, 1.0)[0])
    single = batch.cast(torch.float32)
    assert float(dpo_loss_fn(single.pack, single.logprobs, 1.0)[0]) == pytest.approx(exact, abs=1e-3)


@QUICK
@given(chosen=st.lists(st.floats(-30, 30), max_size=4), shift=st.floats(-5, 5))
def test_the_reward_model_loss_equals_its_formula(chosen, shift):
    rejected = [score / 2 + shift for score in chosen]
    scores = torch.tensor([s for pair in zip(chosen, rejected, strict=True) for s in pair], dtype=torch.float64)
    loss, metrics = reward_model_loss_fn({"packed_num_sequences": len(scores)}, scores)
    margins = [c - r for c, r in zip(chosen, rejected, strict=True)]
    expected = {
        "rm_loss": written_out.mean([math.log(1 + math.exp(-margin)) for margin in margins]),
        "rm_accuracy": written_out.mean([float(margin > 0) for margin in margins]),
        "rm_margin": written_out.mean(margins),
        "rm_chosen_score": written_out.mean(chosen),
        "rm_rejected_score": written_out.mean(rejected),
    }
    assert {name: value_of(metrics[name]) for name in metrics} == pytest.approx(expected, **EXACT)
    assert float(loss) == pytest.approx(expected["rm_loss"], **EXACT)


def test_the_reward_model_loss_does_not_change_when_all_scores_shift_equally():
    scores = torch.tensor([0.3, -0.4, 1.0, 2.0], dtype=torch.float64)
    pack = {"packed_num_sequences": 4}
    low, high = (float(reward_model_loss_fn(pack, scores + by)[0]) for by in (0.0, 7.0))
    assert low == pytest.approx(high)


def test_an_odd_number_of_sequences_is_refused():
    batch = make_batch([3, 3, 3])
    with pytest.raises(ValueError, match="dpo_loss_fn needs an even number of sequences, got 3"):
        dpo_loss_fn(batch.pack, batch.logprobs)
    with pytest.raises(ValueError, match="reward_model_loss_fn needs an even number of sequences, got 3"):
        reward_model_loss_fn(batch.pack, batch.scores)


def test_scores_are_refused_unless_there_is_one_per_sequence():
    batch = make_batch([3, 3])
    with pytest.raises(ValueError, match=r"one score for each of 2 sequences, got scores of shape \(6,\)"):
        reward_model_loss_fn(batch.pack, batch.logprobs)


def test_a_missing_reference_is_refused():
    batch = make_batch([3, 3])
    del batch.pack["packed_ref_logprobs"]
    with pytest.raises(ValueError, match=r"dpo_loss_fn needs packed_ref_logprobs.*set ref_logprobs in every row"):
        dpo_loss_fn(batch.pack, batch.logprobs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "ranked"}, "'ranked' is unknown; choose one of: sigmoid, ipo, hinge"),
        ({"beta": 0.0}, "beta must be above 0, got 0.0"),
        ({"label_smoothing": 0.5}, "label_smoothing must be at least 0 and below 0.5, got 0.5"),
        ({"label_smoothing": -0.1}, "label_smoothing must be at least 0 and below 0.5, got -0.1"),
    ],
)
def test_bad_arguments_are_refused_with_their_name_and_value(options, message):
    batch = make_batch([3, 3])
    with pytest.raises(ValueError, match=message):
        dpo_loss_fn(batch.pack, batch.logprobs, **options)
