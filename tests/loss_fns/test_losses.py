"""Each loss against its formula written out in float64 loops, and its gradient against finite differences."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch

from areno.loss_fns import (
    Mean,
    Spread,
    compute_group_advantages,
    grpo_loss_fn,
    gspo_loss_fn,
    reduces_over,
    reduction_of,
    sft_loss_fn,
)


def make_pack(lengths, seed=0, mask_share=0.7, shift=0.3):
    rng = np.random.default_rng(seed)
    actions = sum(lengths)
    ids = np.repeat(np.arange(len(lengths)), lengths)
    mask = rng.random(actions) < mask_share
    old = -rng.random(actions) * 4
    logprobs = np.where(mask, old + rng.normal(0, shift, actions), 0.0)
    advantages = rng.normal(0, 1, len(lengths))[ids]
    pack = {
        "packed_response_mask": torch.tensor(mask),
        "packed_logprobs": torch.tensor(old),
        "packed_advantages": torch.tensor(advantages),
        "packed_seq_ids": torch.tensor(ids),
        "packed_num_sequences": len(lengths),
    }
    return pack, torch.tensor(logprobs), (ids, mask, old, logprobs, advantages)


def written_out_grpo(ids, mask, old, new, adv, eps):
    terms = []
    for t in range(len(ids)):
        if mask[t]:
            ratio = math.exp(new[t] - old[t])
            terms.append(-min(ratio * adv[t], min(max(ratio, 1 - eps), 1 + eps) * adv[t]))
    return sum(terms) / max(len(terms), 1)


def written_out_gspo(ids, mask, old, new, adv, eps, sequences):
    total = 0.0
    for s in range(sequences):
        own = [t for t in range(len(ids)) if ids[t] == s and mask[t]]
        if own:
            ratio = math.exp(sum(new[t] - old[t] for t in own) / len(own))
            a = sum(adv[t] for t in own) / len(own)
            total += -min(ratio * a, min(max(ratio, 1 - eps), 1 + eps) * a)
    return total / sequences


CASES = [([5, 3, 8], 0.7), ([1, 1], 1.0), ([4, 4], 0.0), ([20, 1, 7, 2], 0.5)]


@pytest.mark.parametrize(("lengths", "share"), CASES)
@pytest.mark.parametrize("eps", [0.05, 0.2])
def test_grpo_equals_its_formula(lengths, share, eps):
    for seed in range(5):
        pack, logprobs, raw = make_pack(lengths, seed, share)
        loss, metrics = grpo_loss_fn(pack, logprobs, clip_eps=eps)
        assert float(loss) == pytest.approx(written_out_grpo(*raw, eps), abs=1e-9)
        assert float(metrics["policy_loss"].total) == pytest.approx(float(loss) * max(int(raw[1].sum()), 1), abs=1e-6)


@pytest.mark.parametrize(("lengths", "share"), CASES)
@pytest.mark.parametrize("eps", [3e-4, 0.1])
def test_gspo_equals_its_formula(lengths, share, eps):
    for seed in range(5):
        pack, logprobs, raw = make_pack(lengths, seed, share)
        loss, _ = gspo_loss_fn(pack, logprobs, clip_eps=eps)
        assert float(loss) == pytest.approx(written_out_gspo(*raw, eps, len(lengths)), abs=1e-7)


def test_sft_is_the_mean_negative_log_likelihood_of_the_targets():
    pack, logprobs, (_, mask, _, new, _) = make_pack([5, 3, 8])
    loss, metrics = sft_loss_fn(pack, logprobs)
    assert float(loss) == pytest.approx(-new[mask].mean())
    assert float(metrics["sft_loss"].total / metrics["sft_loss"].count) == pytest.approx(float(loss))


@pytest.mark.parametrize(
    "loss_fn", [sft_loss_fn, partial(grpo_loss_fn, clip_eps=0.1), partial(gspo_loss_fn, clip_eps=0.05)]
)
def test_gradients_equal_finite_differences(loss_fn):
    pack, logprobs, _ = make_pack([6, 2, 9], seed=3)
    logprobs.requires_grad_(True)
    loss_fn(pack, logprobs)[0].backward()
    step = 1e-6
    for t in range(len(logprobs)):
        up, down = logprobs.detach().clone(), logprobs.detach().clone()
        up[t] += step
        down[t] -= step
        slope = (float(loss_fn(pack, up)[0]) - float(loss_fn(pack, down)[0])) / (2 * step)
        assert float(logprobs.grad[t]) == pytest.approx(slope, abs=1e-6)


def test_the_clip_range_changes_the_result_and_is_counted():
    pack, logprobs, _ = make_pack([10, 10], shift=0.5, mask_share=1.0)
    narrow, wide = grpo_loss_fn(pack, logprobs, clip_eps=0.05), grpo_loss_fn(pack, logprobs, clip_eps=10.0)
    assert float(narrow[0]) != float(wide[0])
    assert float(narrow[1]["clip_fraction"].total) > 0
    assert float(wide[1]["clip_fraction"].total) == 0


def test_on_policy_the_ratio_is_one_and_the_loss_is_minus_the_mean_advantage():
    pack, _, (_, mask, _, _, adv) = make_pack([6, 6])
    loss, metrics = grpo_loss_fn(pack, torch.where(pack["packed_response_mask"], pack["packed_logprobs"], 0.0))
    assert float(loss) == pytest.approx(-adv[mask].mean())
    ratio: Spread = metrics["ratio"]
    assert float(ratio.total / ratio.count) == 1.0


@pytest.mark.parametrize("gap", [1e4, -1e4])
@pytest.mark.parametrize("loss_fn", [grpo_loss_fn, gspo_loss_fn])
def test_extreme_ratios_stay_finite(loss_fn, gap):
    pack, logprobs, _ = make_pack([6, 6], mask_share=1.0)
    logprobs = (pack["packed_logprobs"] + gap).requires_grad_(True)
    loss = loss_fn(pack, logprobs)[0]
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs.grad).all()


def test_masked_tokens_have_no_influence():
    pack, logprobs, (_, mask, *_) = make_pack([6, 6])
    noisy = torch.where(torch.tensor(mask), logprobs, torch.randn(12, dtype=torch.float64) * 9)
    for loss_fn in (sft_loss_fn, grpo_loss_fn, gspo_loss_fn):
        assert float(loss_fn(pack, logprobs)[0]) == pytest.approx(float(loss_fn(pack, noisy)[0]))


def test_reduction_is_found_through_partials():
    assert reduction_of(partial(partial(gspo_loss_fn, clip_eps=0.1))) == "sequence"
    assert reduction_of(grpo_loss_fn) == "token"
    assert reduction_of(lambda pack, logprobs: logprobs.sum()) == "token"
    assert reduction_of(reduces_over("pair")(lambda pack, logprobs: logprobs.sum())) == "pair"


@pytest.mark.parametrize("value", [0.9, 0.3, 0.1, -1 / 3, 1e9, 0.0])
@pytest.mark.parametrize("size", [1, 3, 6, 8])
def test_equal_rewards_give_exactly_zero(value, size):
    assert compute_group_advantages([value] * size) == [0.0] * size


def test_advantages_are_standardised_with_the_population_deviation():
    rewards = [0.0, 1.0, 1.0, 0.5]
    expected = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards) + 1e-8)
    assert compute_group_advantages(rewards) == pytest.approx(expected.tolist(), abs=1e-12)
    assert compute_group_advantages([]) == []


def test_metrics_are_sums_and_counts():
    _, metrics = grpo_loss_fn(*make_pack([3, 3])[:2])
    assert {type(value) for value in metrics.values()} == {Mean, Spread}
