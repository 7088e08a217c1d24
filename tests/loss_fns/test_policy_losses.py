"""GRPO, GSPO and PPO against their formulas written out in float64 loops, and what each of their options does."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areno.algorithms.gmpo import GMPOOptions, gmpo_loss_fn
from areno.loss_fns import Mean, Spread, TokenFlags, grpo_loss_fn, gspo_loss_fn, ppo_loss_fn
from tests.loss_fns import written_out
from tests.loss_fns.packs import QUICK, batches, make_batch, value_of

EXACT = {"rel": 1e-6, "abs": 1e-9}
POLICY_LOSSES = [grpo_loss_fn, gspo_loss_fn, ppo_loss_fn]
clip_ranges = st.tuples(st.sampled_from([0.01, 0.2]), st.sampled_from([None, 0.05, 0.5]))
kl_terms = st.tuples(st.sampled_from([0.0, 0.3]), st.sampled_from(["kl", "abs", "mse", "low_var_kl"]))


@QUICK
@given(batch=batches(), clip=clip_ranges, dual=st.sampled_from([None, 1.2, 3.0]), kl=kl_terms)
@pytest.mark.parametrize("loss_mean", ["token", "sequence", "dr_grpo"])
def test_grpo_equals_its_formula(loss_mean, batch, clip, dual, kl):
    loss, metrics = grpo_loss_fn(
        batch.pack,
        batch.logprobs,
        clip[0],
        clip_eps_high=clip[1],
        dual_clip=dual,
        loss_mean=loss_mean,
        max_tokens=13,
        kl_coef=kl[0],
        kl_type=kl[1],
    )
    formula = partial(
        written_out.grpo, batch.rows, clip[0], clip[1] or clip[0], dual or math.inf, loss_mean, 13, kind=kl[1]
    )
    assert float(loss) == pytest.approx(formula(kl_coef=kl[0]), **EXACT)
    assert value_of(metrics["total_loss"]) == pytest.approx(float(loss), **EXACT)
    assert value_of(metrics["policy_loss"]) == pytest.approx(formula(kl_coef=0.0), **EXACT)
    if kl[0]:
        assert value_of(metrics["kl_loss"]) * kl[0] == pytest.approx(formula(kl_coef=kl[0]) - formula(), **EXACT)


@QUICK
@given(batch=batches(), clip=clip_ranges, kl=kl_terms)
def test_gspo_equals_its_formula(batch, clip, kl):
    loss, metrics = gspo_loss_fn(
        batch.pack, batch.logprobs, clip[0], clip_eps_high=clip[1], kl_coef=kl[0], kl_type=kl[1]
    )
    formula = partial(written_out.gspo, batch.rows, clip[0], clip[1] or clip[0], kind=kl[1])
    assert float(loss) == pytest.approx(formula(kl_coef=kl[0]), **EXACT)
    assert value_of(metrics["total_loss"]) == pytest.approx(float(loss), **EXACT)
    assert value_of(metrics["policy_loss"]) == pytest.approx(formula(), **EXACT)


@QUICK
@given(batch=batches(), eps=st.sampled_from([0.05, 0.4]))
def test_gmpo_equals_its_formula(batch, eps):
    loss, metrics = gmpo_loss_fn(batch.pack, batch.logprobs, GMPOOptions(eps))
    assert float(loss) == pytest.approx(written_out.gmpo(batch.rows, eps), **EXACT)
    assert value_of(metrics["clip_fraction"]) == pytest.approx(written_out.gmpo_clipped(batch.rows, eps), **EXACT)
    assert value_of(metrics["total_loss"]) == pytest.approx(float(loss), **EXACT)


@QUICK
@given(batch=batches(), clip=clip_ranges, dual=st.sampled_from([1.2, 3.0]), kl=kl_terms, with_ref=st.booleans())
def test_ppo_equals_its_formula(batch, clip, dual, kl, with_ref):
    rows, against = batch.rows, "ref_logprobs" if with_ref else "logprobs"
    if not with_ref:
        del batch.pack["packed_ref_logprobs"]
    loss, metrics = ppo_loss_fn(
        batch.pack,
        batch.logprobs,
        clip[0],
        clip_eps_high=clip[1],
        clip_ratio_c=dual,
        use_kl_loss=kl[0] > 0,
        kl_loss_coef=kl[0],
        kl_loss_type=kl[1],
    )
    expected = written_out.ppo(rows, clip[0], clip[1] or clip[0], dual, kl[0], kl[1], against)
    assert float(loss) == pytest.approx(expected, **EXACT)
    assert value_of(metrics["total_loss"]) == pytest.approx(float(loss), **EXACT)
    assert ("kl_loss" in metrics) == ("kl_coef" in metrics) == (kl[0] > 0)
    if kl[0]:
        assert value_of(metrics["kl_coef"]) == kl[0]


@QUICK
@given(batch=batches(shifts=(0.3, 1.0)))
def test_clip_fractions_are_counted_separately_for_each_side(batch):
    options = {"clip_eps": 0.1, "clip_eps_high": 0.3}
    tokens = [(math.exp(t["x"] - t["logprobs"]), t["advantages"]) for row in batch.rows for t in row]
    high = written_out.mean([float(r > 1.3 and a > 0) for r, a in tokens])
    low = written_out.mean([float(r < 0.9 and a < 0) for r, a in tokens])
    dual = written_out.mean([float(r > 1.5 and a < 0) for r, a in tokens])
    _, grpo = grpo_loss_fn(batch.pack, batch.logprobs, dual_clip=1.5, **options)
    _, ppo = ppo_loss_fn(batch.pack, batch.logprobs, clip_ratio_c=1.5, **options)
    assert value_of(grpo["clip_fraction_high"]) == pytest.approx(high)
    assert value_of(grpo["clip_fraction_low"]) == pytest.approx(low)
    assert value_of(grpo["clip_fraction_dual"]) == pytest.approx(dual)
    assert value_of(grpo["clip_fraction"]) == pytest.approx(high + low + dual)
    assert value_of(ppo["pg_clipfrac"]) == pytest.approx(high + low)
    assert value_of(ppo["pg_clipfrac_lower"]) == pytest.approx(dual)
    differences = [t["logprobs"] - t["x"] for row in batch.rows for t in row]
    assert value_of(ppo["ppo_kl"]) == pytest.approx(written_out.mean(differences), **EXACT)


def test_gspo_counts_clipped_sequences():
    batch = make_batch([4, 4, 4, 4], mask_share=1.0)
    batch.pack["packed_advantages"] = torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat_interleave(4)
    shifts = torch.tensor([0.1, -0.1, -0.1, 0.001], dtype=torch.float64).repeat_interleave(4)
    _, metrics = gspo_loss_fn(batch.pack, batch.pack["packed_logprobs"] + shifts, clip_eps=0.01)
    fractions = {name: value_of(metrics[name]) for name in metrics if name.startswith("clip_fraction")}
    assert fractions == {"clip_fraction": 0.5, "clip_fraction_high": 0.25, "clip_fraction_low": 0.25}


def test_only_clipped_tokens_get_no_gradient():
    batch = make_batch([8, 8], mask_share=1.0, shift=0.6, seed=2)
    logprobs = batch.logprobs.requires_grad_(True)
    loss, metrics = grpo_loss_fn(batch.pack, logprobs, clip_eps=0.1, dual_clip=1.2)
    loss.backward()
    clipped = float(metrics["clip_fraction"].total)
    assert 0 < clipped < 16
    assert int((logprobs.grad == 0).sum()) == clipped


OPTIONS = [
    (grpo_loss_fn, {"clip_eps": 0.05}),
    (grpo_loss_fn, {"clip_eps_high": 0.5}),
    (grpo_loss_fn, {"dual_clip": 1.1}),
    (grpo_loss_fn, {"loss_mean": "sequence"}),
    (grpo_loss_fn, {"loss_mean": "dr_grpo", "max_tokens": 30}),
    (grpo_loss_fn, {"kl_coef": 0.1}),
    (gspo_loss_fn, {"clip_eps": 0.5}),
    (gspo_loss_fn, {"clip_eps_high": 0.5}),
    (gspo_loss_fn, {"kl_coef": 0.1}),
    (ppo_loss_fn, {"clip_eps": 0.05}),
    (ppo_loss_fn, {"clip_eps_high": 0.5}),
    (ppo_loss_fn, {"clip_ratio_c": 1.1}),
    (ppo_loss_fn, {"use_kl_loss": True}),
]


@pytest.mark.parametrize(("loss_fn", "options"), OPTIONS, ids=lambda x: getattr(x, "__name__", None) or str(x))
def test_each_option_changes_the_result_once_the_policy_has_moved(loss_fn, options):
    batch = make_batch([12, 5, 9, 7, 3, 3, 4, 2], shift=0.8, mask_share=1.0, seed=1)
    plain, changed = (loss_fn(batch.pack, batch.logprobs, **more)[0] for more in ({}, options))
    assert float(plain) != pytest.approx(float(changed), rel=1e-6)


@pytest.mark.parametrize("loss_fn", POLICY_LOSSES)
def test_clip_ranges_do_nothing_before_the_policy_has_moved(loss_fn):
    batch = make_batch([6, 6], shift=0.0)
    narrow, wide = (loss_fn(batch.pack, batch.logprobs, clip_eps=eps) for eps in (1e-3, 0.9))
    assert float(narrow[0]) == float(wide[0])
    ratio: Spread = narrow[1]["ratio"]
    assert float(ratio.total / ratio.count) == 1.0
    advantages = [t["advantages"] for row in batch.rows for t in row]
    assert value_of(narrow[1]["advantage_mean"]) == pytest.approx(written_out.mean(advantages))


def test_dual_clip_bounds_the_loss_of_a_bad_token():
    batch = make_batch([1], mask_share=1.0)
    batch.pack["packed_advantages"] = torch.tensor([-2.0])
    logprobs = batch.pack["packed_logprobs"] + 10.0
    assert float(grpo_loss_fn(batch.pack, logprobs)[0]) == pytest.approx(2 * math.exp(10))
    assert float(grpo_loss_fn(batch.pack, logprobs, dual_clip=4.0)[0]) == pytest.approx(8.0)
    assert float(ppo_loss_fn(batch.pack, logprobs)[0]) == pytest.approx(6.0)


def test_one_outlier_token_does_not_bound_the_ratio_of_a_long_sequence():
    batch = make_batch([100], mask_share=1.0, shift=0.0)
    batch.pack["packed_advantages"] = torch.ones(100)
    logprobs = batch.logprobs.clone()
    logprobs[3] -= 40.0
    assert float(gspo_loss_fn(batch.pack, logprobs, clip_eps=0.5)[0]) == pytest.approx(-math.exp(-0.4))


def test_dr_grpo_weights_tokens_equally_and_the_sequence_mean_weights_answers_equally():
    batch = make_batch([2, 8], mask_share=1.0, shift=0.0)
    gradients = {}
    for loss_mean in ("token", "sequence", "dr_grpo"):
        batch.pack["packed_advantages"] = torch.ones(10)
        logprobs = batch.logprobs.clone().requires_grad_(True)
        grpo_loss_fn(batch.pack, logprobs, loss_mean=loss_mean, max_tokens=16)[0].backward()
        gradients[loss_mean] = (float(logprobs.grad[0]), float(logprobs.grad[-1]))
    assert gradients["token"] == pytest.approx((-1 / 10, -1 / 10))
    assert gradients["sequence"] == pytest.approx((-1 / 4, -1 / 16))
    assert gradients["dr_grpo"] == pytest.approx((-1 / 32, -1 / 32))


@pytest.mark.parametrize("loss_fn", POLICY_LOSSES)
def test_statistics_describe_the_batch(loss_fn):
    batch = make_batch([5, 3, 8], seed=4)
    _, metrics = loss_fn(batch.pack, batch.logprobs)
    tokens = [t for row in batch.rows for t in row]
    assert {type(value) for value in metrics.values()} == {Mean, Spread, TokenFlags}
    assert value_of(metrics["entropy"]) == pytest.approx(written_out.mean([t["entropy"] for t in tokens]))
    assert value_of(metrics["train_logprobs_mean"]) == pytest.approx(written_out.mean([t["x"] for t in tokens]))
    rollout = written_out.mean([t["logprobs"] for t in tokens])
    assert value_of(metrics["rollout_logprobs_mean"]) == pytest.approx(rollout)
    gaps = [t["x"] - t["logprobs"] for t in tokens]
    assert value_of(metrics["logp_diff_mean"]) == pytest.approx(written_out.mean(gaps))
    assert value_of(metrics["logp_abs_diff_mean"]) == pytest.approx(written_out.mean([abs(g) for g in gaps]))
    assert value_of(metrics["response_len"]) == pytest.approx(len(tokens) / 3)
    del batch.pack["packed_entropy"]
    assert "entropy" not in loss_fn(batch.pack, batch.logprobs)[1]


@pytest.mark.parametrize(("dtype", "shift", "tolerance"), [(torch.float64, 0.3, 1e-9), (torch.float32, 1e-4, 0.01)])
def test_ratio_statistics_match_the_tokens(dtype, shift, tolerance):
    batch = make_batch([50, 30, 80], shift=shift, seed=4).cast(dtype)
    spread: Spread = grpo_loss_fn(batch.pack, batch.logprobs)[1]["ratio"]
    ratios = torch.tensor([math.exp(t["x"] - t["logprobs"]) for row in batch.rows for t in row], dtype=torch.float64)
    mean = float(spread.total / spread.count)
    assert mean == pytest.approx(float(ratios.mean()))
    deviation = math.sqrt(float(spread.square / spread.count) - mean**2)
    assert deviation == pytest.approx(float(ratios.std(correction=0)), rel=tolerance)


@pytest.mark.parametrize("loss_fn", [grpo_loss_fn, gspo_loss_fn])
def test_a_kl_term_without_a_reference_is_refused(loss_fn):
    batch = make_batch([4, 4])
    del batch.pack["packed_ref_logprobs"]
    with pytest.raises(ValueError, match=r"kl_coef=0\.1 needs packed_ref_logprobs.*set ref_logprobs"):
        loss_fn(batch.pack, batch.logprobs, kl_coef=0.1)
    loss_fn(batch.pack, batch.logprobs, kl_coef=0.0)


REFUSED = [
    (grpo_loss_fn, {"clip_eps": 0.0}, "clip_eps must be above 0, got 0.0"),
    (gspo_loss_fn, {"clip_eps_high": -1.0}, "clip_eps_high must be above 0, got -1.0"),
    (grpo_loss_fn, {"dual_clip": 1.0}, r"dual_clip.* must be above 1, got 1.0"),
    (ppo_loss_fn, {"clip_ratio_c": 0.5}, r"clip_ratio_c.* must be above 1, got 0.5"),
    (ppo_loss_fn, {"use_kl_loss": True, "kl_loss_coef": -0.1}, "kl_loss_coef must not be negative, got -0.1"),
    (ppo_loss_fn, {"use_kl_loss": True, "kl_loss_type": "k9"}, "'k9' is unknown"),
    (gspo_loss_fn, {"kl_coef": -0.1}, "kl_coef must not be negative, got -0.1"),
    (gspo_loss_fn, {"kl_coef": math.nan}, "kl_coef must not be negative, got nan"),
    (grpo_loss_fn, {"loss_mean": "rows"}, "'rows' is unknown; choose one of: token, sequence, dr_grpo"),
    (grpo_loss_fn, {"loss_mean": "dr_grpo"}, "needs max_tokens above 0, got None"),
    (grpo_loss_fn, {"loss_mean": "dr_grpo", "max_tokens": 0}, "needs max_tokens above 0, got 0"),
]


@pytest.mark.parametrize(("loss_fn", "options", "message"), REFUSED)
def test_bad_arguments_are_refused_with_their_name_and_value(loss_fn, options, message):
    batch = make_batch([4, 4])
    with pytest.raises(ValueError, match=message):
        loss_fn(batch.pack, batch.logprobs, **options)
