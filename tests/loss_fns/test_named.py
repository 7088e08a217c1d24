"""Critic, SFT, reward-model and preference losses under their documented names, against formulas written out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areno.loss_fns import value_loss_fn
from areno.loss_fns.units import mean_loss, means, of_all, with_names
from areno.loss_fns.value import CRITIC_NAMES
from areno.training.objectives.pairs import DPO, REWARD_MODEL
from areno.training.objectives.sft import SFT
from tests.loss_fns import written_out
from tests.loss_fns.packs import QUICK, batches, make_batch, value_of
from tests.loss_fns.written_out import mean

EXACT = {"rel": 1e-6, "abs": 1e-9}


def bounds(metric):
    return float(metric.minimum), float(metric.maximum)


@QUICK
@given(batch=batches(), eps=st.sampled_from([0.1, 0.5]))
def test_the_critic_loss_is_half_the_larger_of_two_squares(batch, eps):
    loss, metrics = with_names(value_loss_fn, CRITIC_NAMES, cliprange_value=eps, value_loss_coef=1.0)(
        batch.pack, batch.logprobs
    )
    assert float(loss) == pytest.approx(written_out.value(batch.rows, eps, 1.0), **EXACT)
    assert value_of(metrics["critic_loss"]) == pytest.approx(float(loss), **EXACT)
    tokens = [t for row in batch.rows for t in row]
    for name, key in (("new_value", "x"), ("old_value", "values"), ("target_value", "returns")):
        assert value_of(metrics[name]) == pytest.approx(mean([t[key] for t in tokens]), **EXACT)
        if tokens:
            assert float(metrics[name].maximum) == pytest.approx(max(t[key] for t in tokens))


def test_a_loss_with_fewer_quantities_is_reported_without_the_others():
    @mean_loss("token", means("", "loss"))
    def loss_fn(data_pack, predicted):
        return {"loss": of_all(predicted.square())}

    loss, metrics = with_names(loss_fn, DPO.names)(None, torch.tensor([1.0, 3.0]))
    assert float(loss) == 5.0
    assert {name: value_of(metric) for name, metric in metrics.items()} == {"loss": 5.0}


@QUICK
@given(batch=batches())
def test_sft_reports_the_perplexity_of_each_sequence(batch):
    loss, metrics = SFT.experiment_loss()(batch.pack, batch.logprobs)
    tokens = [t["x"] for row in batch.rows for t in row]
    assert float(loss) == pytest.approx(-mean(tokens), **EXACT)
    assert value_of(metrics["loss"]) == pytest.approx(-mean(tokens), **EXACT)
    if tokens:
        assert bounds(metrics["loss"]) == pytest.approx((-max(tokens), -min(tokens)), **EXACT)
    perplexities = [math.exp(-mean([t["x"] for t in row])) for row in batch.rows if row]
    assert value_of(metrics["ppl"]) == pytest.approx(mean(perplexities), **EXACT)


@QUICK
@given(batch=batches())
def test_a_reward_model_learns_the_probability_that_the_better_answer_wins(batch):
    loss, metrics = REWARD_MODEL.experiment_loss()(batch.pack, batch.scores)
    chosen, rejected = batch.scores[0::2].tolist(), batch.scores[1::2].tolist()
    losses = [math.log(1 + math.exp(r - c)) for c, r in zip(chosen, rejected, strict=True)]
    assert float(loss) == pytest.approx(mean(losses), **EXACT)
    expected = {
        "loss": mean(losses),
        "correct_ratio": mean([float(c > r) for c, r in zip(chosen, rejected, strict=True)]),
        "pos_score": mean(chosen),
        "neg_score": mean(rejected),
        "n_pairs": len(losses),
    }
    assert {name: value_of(metric) for name, metric in metrics.items()} == pytest.approx(expected, **EXACT)
    if losses:
        assert bounds(metrics["loss"]) == pytest.approx((min(losses), max(losses)), **EXACT)
        assert bounds(metrics["pos_score"]) == pytest.approx((min(chosen), max(chosen)), **EXACT)


@QUICK
@given(batch=batches(), beta=st.sampled_from([0.1, 0.7]), kind=st.sampled_from(["sigmoid", "ipo"]))
def test_dpo_compares_sums_and_ipo_means_per_token(batch, beta, kind):
    per_token = kind == "ipo"
    loss_fn = DPO.experiment_loss(beta=beta, loss_type=kind, length_normalized=per_token)
    loss, metrics = loss_fn(batch.pack, batch.logprobs)
    assert float(loss) == pytest.approx(written_out.dpo(batch.rows, beta, shape=kind, normalized=per_token), **EXACT)
    pairs = written_out.dpo_deltas(batch.rows, per_token)
    expected = {
        "loss": float(loss),
        "chosen_reward": beta * mean([c for c, _ in pairs]),
        "rejected_reward": beta * mean([r for _, r in pairs]),
        "reward_margin": beta * mean([c - r for c, r in pairs]),
    }
    accuracy = value_of(metrics.pop("reward_accuracy"))
    assert {name: value_of(metric) for name, metric in metrics.items()} == pytest.approx(expected, **EXACT)
    if pairs:
        rewards = [beta * r for _, r in pairs]
        assert bounds(metrics["rejected_reward"]) == pytest.approx((min(rewards), max(rewards)), **EXACT)
    # Rounding errors decide whether a margin of 0 is positive.
    assert min(mean([float(c - r > e) for c, r in pairs]) for e in (-1e-12, 1e-12)) <= accuracy
    assert accuracy <= max(mean([float(c - r > e) for c, r in pairs]) for e in (-1e-12, 1e-12))


def test_sums_over_long_answers_keep_an_accurate_difference():
    tokens = 20_000
    batch = make_batch([tokens, tokens], mask_share=1.0).cast(torch.float32)
    generator = torch.Generator().manual_seed(0)
    reference = batch.pack["packed_ref_logprobs"] = -torch.rand(2 * tokens, generator=generator)
    batch.logprobs = reference + 1e-4 * torch.randn(2 * tokens, generator=generator)
    differences = (batch.logprobs - reference).tolist()
    delta = math.fsum(differences[:tokens]) - math.fsum(differences[tokens:])
    _, metrics = DPO.experiment_loss(beta=1.0)(batch.pack, batch.logprobs)
    assert value_of(metrics["reward_margin"]) == pytest.approx(delta, rel=1e-6)
