"""The unified policy loss: every combination of knobs against its formula, and properties that the formula does not show."""

from __future__ import annotations

import itertools
import math
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areno.loss_fns import PolicyLossConfig, RejectionSampling, grpo_loss_fn, policy_loss_fn
from tests.loss_fns import written_out_family
from tests.loss_fns.packs import QUICK, VERSION, batches, make_batch, slopes, value_of
from tests.loss_fns.test_rejection import samplings
from tests.loss_fns.written_out import mean

EXACT = {"rel": 1e-6, "abs": 1e-9}


@st.composite
def every_knob(draw):
    kind = draw(st.sampled_from(["clip", "clip", "sapo", "cispo"]))
    decoupled = kind != "sapo" and draw(st.booleans())
    methods = ["recompute", "metrics", "loglinear", "linear", "rollout"]
    method = draw(st.sampled_from(methods)) if decoupled else "recompute"
    second_moment = decoupled and method in ("recompute", "metrics") and draw(st.booleans())
    distill = draw(st.sampled_from([0.0, 0.0, 0.3]))
    return PolicyLossConfig(
        eps_clip=draw(st.sampled_from([0.0, 0.05, 0.2])),
        eps_clip_higher=draw(st.sampled_from([None, 0.0, 0.05, 0.4])) if kind != "sapo" else None,
        c_clip=draw(st.sampled_from([None, 1.2, 3.0])) if kind == "clip" else None,
        importance_sampling_level=draw(st.sampled_from(["token", "sequence"])),
        use_sapo_loss=kind == "sapo",
        sapo_tau_pos=draw(st.sampled_from([1.0, 2.0])) if kind == "sapo" else 1.0,
        use_cispo_loss=kind == "cispo",
        use_decoupled_loss=decoupled,
        prox_logp_method=method,
        rejection_sampling=draw(st.none() | samplings()) if decoupled else None,
        m2_threshold=0.04 if second_moment else None,
        rl_loss_weight=draw(st.sampled_from([0.0, 1.0, 0.5])) if distill else 1.0,
        distill_loss_weight=distill,
    )


def frozen_rows(batch, logprobs=None):
    """Rows with ``x`` from ``logprobs``, and ``x0`` from the log-probs of the batch."""
    constant = batch.rows
    moving = type(batch)(batch.pack, batch.logprobs if logprobs is None else logprobs, batch.scores).rows
    return [
        [token | {"x0": still["x"]} for token, still in zip(row, kept, strict=True)]
        for row, kept in zip(moving, constant, strict=True)
    ]


def run(batch, knobs):
    logprobs = batch.logprobs.detach().clone().requires_grad_(True)
    loss, metrics = policy_loss_fn(batch.pack, logprobs, knobs, version=VERSION)
    loss.backward()
    return float(loss.detach()), logprobs.grad, metrics


@settings(QUICK, max_examples=200)
@given(batch=batches(), knobs=every_knob())
def test_the_loss_equals_its_formula_for_every_combination_of_knobs(batch, knobs):
    loss, _, metrics = run(batch, knobs)
    rows = frozen_rows(batch)
    assert loss == pytest.approx(written_out_family.loss(rows, knobs, VERSION), **EXACT)
    assert value_of(metrics["total_loss"]) == pytest.approx(loss, **EXACT)
    assert value_of(metrics["policy_loss"]) == pytest.approx(written_out_family.policy(rows, knobs, VERSION), **EXACT)
    if knobs.distill_loss_weight:
        gaps = [t["x"] - t["teacher_logprobs"] for row in rows for t in row]
        assert value_of(metrics["rkl_loss"]) == pytest.approx(mean(gaps), **EXACT)


@settings(QUICK, max_examples=80)
@given(batch=batches(shifts=(0.05, 0.5, 2.0)), knobs=every_knob())
def test_the_gradient_is_the_slope_of_the_formula_with_its_frozen_parts_held_constant(batch, knobs):
    _, gradient, _ = run(batch, knobs)
    expected = slopes(lambda x: written_out_family.loss(frozen_rows(batch, x), knobs, VERSION), batch.logprobs)
    assert gradient.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@QUICK
@given(batch=batches(shifts=(0.3, 1.0)), knobs=every_knob())
def test_statistics_have_their_documented_names_and_meanings(batch, knobs):
    _, _, metrics = run(batch, knobs)
    tokens = [t | {"prox": written_out_family.proximal(t, knobs, VERSION)} for row in frozen_rows(batch) for t in row]
    expected = {
        "approx_kl": [t["x"] - t["prox"] for t in tokens],
        "new_logp": [t["x"] for t in tokens],
        "old_logp": [t["logprobs"] for t in tokens],
        "entropy": [t["entropy"] for t in tokens],
    }
    if knobs.importance_sampling_level == "token":
        expected["importance_weight"] = [math.exp(t["x"] - t["prox"]) for t in tokens]
    for name, numbers in expected.items():
        assert value_of(metrics[name]) == pytest.approx(mean(numbers), **EXACT), name
        if numbers:
            assert float(metrics[name].minimum) == pytest.approx(min(numbers), **EXACT)
            assert float(metrics[name].maximum) == pytest.approx(max(numbers), **EXACT)
    assert value_of(metrics["actor_loss"]) == pytest.approx(value_of(metrics["policy_loss"]), **EXACT)
    sapo = {"sapo_soft_gate", "sapo_scaled_gate_pos", "sapo_scaled_gate_neg"}
    clip = {"clip_ratio", "dual_clip_ratio", "clipped_tokens", "clipped_new_logp", "clipped_old_logp"}
    assert (sapo if knobs.use_sapo_loss else clip) <= set(metrics)
    stale = {"behave_imp_weight", "behave_approx_kl", "unclipped_behave_tokens", "rs_filtered_fraction"}
    assert (stale <= set(metrics)) == knobs.use_decoupled_loss


def test_clipped_tokens_are_counted_with_their_log_probs():
    batch = make_batch([4], mask_share=1.0)
    old = batch.pack["packed_logprobs"] = torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.float64)
    batch.pack["packed_advantages"] = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    # Above the clip range, within it, below it, and so far above it that only the dual clip bounds the loss.
    batch.logprobs = old + torch.tensor([0.5, 0.1, -0.5, 1.5], dtype=torch.float64)
    _, gradient, metrics = run(batch, PolicyLossConfig(c_clip=3.0))
    assert value_of(metrics["clip_ratio"]) == 0.5
    assert value_of(metrics["dual_clip_ratio"]) == 0.25
    assert value_of(metrics["clipped_tokens"]) == 2
    assert value_of(metrics["clipped_old_logp"]) == pytest.approx(-2.0)
    assert value_of(metrics["clipped_new_logp"]) == pytest.approx((-0.5 - 3.5) / 2)
    assert (gradient != 0).tolist() == [False, True, False, False]


@pytest.mark.parametrize("left_out_by", ["rejection_sampling", "m2_threshold"])
def test_an_excluded_token_does_not_affect_the_ratio_or_advantage_of_its_sequence(left_out_by):
    batch = make_batch([4], mask_share=1.0)
    old = batch.pack["packed_logprobs"] = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    batch.pack["packed_prox_logprobs"] = old + torch.tensor([0.0, 0.0, 0.0, 3.0])
    batch.pack["packed_advantages"] = torch.tensor([1.0, 1.0, 1.0, -2.0], dtype=torch.float64)
    batch.pack["packed_keep"] = torch.tensor([True, True, True, False])
    batch.logprobs = batch.pack["packed_prox_logprobs"] + torch.tensor([0.0, 0.1, -0.1, 0.8])
    chosen = {"rejection_sampling": RejectionSampling()} if left_out_by == "rejection_sampling" else {left_out_by: 1.0}
    loss, gradient, metrics = run(
        batch, PolicyLossConfig(importance_sampling_level="sequence", use_decoupled_loss=True, **chosen)
    )
    # Ratio and advantage are those of the first three tokens, 1 and 1; the fourth still counts in the denominator.
    assert loss == pytest.approx(-3 / 4)
    assert gradient.tolist() == pytest.approx([-0.25, -0.25, -0.25, 0.0])
    assert value_of(metrics["clip_ratio"]) == 0


def test_clip_statistics_cover_only_the_tokens_that_rejection_sampling_keeps():
    batch = make_batch([4], mask_share=1.0)
    old = batch.pack["packed_logprobs"] = torch.full((4,), -1.0, dtype=torch.float64)
    batch.pack["packed_prox_logprobs"] = old + torch.tensor([0.0, 0.0, 3.0, 3.0])
    batch.pack["packed_advantages"] = torch.tensor([1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    # Kept: one above the clip range and one within it. Rejected: one above it, and one that a dual clip would bound.
    batch.logprobs = batch.pack["packed_prox_logprobs"] + torch.tensor([0.5, 0.1, 0.5, 1.5])
    knobs = {"use_decoupled_loss": True, "rejection_sampling": RejectionSampling()}
    _, _, metrics = run(batch, PolicyLossConfig(c_clip=3.0, **knobs))
    names = ("clip_ratio", "dual_clip_ratio", "clipped_tokens", "clip_fraction", "clip_fraction_high")
    assert [value_of(metrics[name]) for name in names] == [0.5, 0.0, 1.0, 0.5, 0.5]
    assert value_of(metrics["clipped_new_logp"]) == pytest.approx(-0.5)
    _, _, metrics = run(batch, PolicyLossConfig(use_cispo_loss=True, **knobs))
    assert [value_of(metrics[name]) for name in names[:3]] == [0.5, 0.0, 1.0]


def test_behavior_statistics_cover_only_tokens_within_the_bounds():
    batch = make_batch([3], mask_share=1.0)
    batch.pack["packed_prox_logprobs"] = batch.pack["packed_logprobs"] + torch.tensor([0.0, 0.1, 3.0])
    knobs = PolicyLossConfig(use_decoupled_loss=True, rejection_sampling=RejectionSampling(upper=5.0))
    _, _, metrics = run(batch, knobs)
    assert value_of(metrics["unclipped_behave_tokens"]) == 2
    assert value_of(metrics["rs_filtered_fraction"]) == pytest.approx(1 / 3)
    assert value_of(metrics["behave_approx_kl"]) == pytest.approx(0.05)
    assert value_of(metrics["behave_imp_weight"]) == pytest.approx((1 + math.exp(0.1)) / 2)
    assert knobs.scalars() == {"eps_clip": 0.2, "use_dual_clip": 0.0, "rs_upper": 5.0}


# -- defects of other implementations -------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [None, RejectionSampling(upper=1e6)])
def test_decoupled_tokens_carry_the_behavior_weight_with_and_without_rejection_sampling(sampling):
    batch = make_batch([5, 3], mask_share=1.0, shift=0.5)
    prox, old = batch.pack["packed_prox_logprobs"], batch.pack["packed_logprobs"]
    batch.logprobs = prox.clone()
    _, gradient, _ = run(batch, PolicyLossConfig(use_decoupled_loss=True, rejection_sampling=sampling))
    expected = -(prox - old).exp() * batch.pack["packed_advantages"] / 8
    assert gradient.tolist() == pytest.approx(expected.tolist(), rel=1e-9)
    assert (prox - old).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_clip_range_of_zero_keeps_the_whole_gradient_at_a_ratio_of_one(dtype):
    batch = make_batch([2, 2], mask_share=1.0)
    batch.pack["packed_advantages"] = torch.tensor([2.0, 2.0, -2.0, -2.0])
    batch.pack["packed_prox_logprobs"] = batch.pack["packed_logprobs"].clone()
    batch.pack["packed_keep"] = torch.ones(4, dtype=torch.bool)
    batch.logprobs = batch.pack["packed_logprobs"].clone()
    knobs = PolicyLossConfig(eps_clip=0.0, use_decoupled_loss=True, m2_threshold=0.04)
    _, gradient, _ = run(batch.cast(dtype), knobs)
    assert (gradient * 4).tolist() == [-2.0, -2.0, 2.0, 2.0]


def test_rejected_tokens_stay_in_the_denominator():
    batch = make_batch([4], mask_share=1.0)
    batch.pack["packed_prox_logprobs"] = batch.pack["packed_logprobs"] + torch.tensor([0.0, 0.0, 0.0, 9.0])
    batch.logprobs = batch.pack["packed_prox_logprobs"].clone()
    batch.pack["packed_advantages"] = torch.ones(4)
    loss, gradient, _ = run(batch, PolicyLossConfig(use_decoupled_loss=True, rejection_sampling=RejectionSampling()))
    assert loss == pytest.approx(-3 / 4)
    assert gradient.tolist() == pytest.approx([-0.25, -0.25, -0.25, 0.0])


def exact_reverse_kl_gradient(logits, teacher):
    """Gradient of sum_a pi(a) (log pi(a) - log T(a)) with respect to the logits, by autograd over the whole vocabulary."""
    logits = logits.clone().requires_grad_(True)
    log_pi = logits.log_softmax(-1)
    (log_pi.exp() * (log_pi - teacher)).sum().backward()
    return logits.grad


@pytest.mark.parametrize("rl_weight", [0.0, 1.0])
@pytest.mark.parametrize("stale", [0.0, 0.4])
def test_distillation_gives_an_unbiased_reverse_kl_gradient_alone_and_with_the_rl_loss(rl_weight, stale):
    """The gradients of all tokens, weighted by the sampler's probabilities, sum to the exact expectation, not an estimate."""
    generator = torch.Generator().manual_seed(3)
    vocabulary = 7
    logits, teacher_logits, drift = (torch.randn(vocabulary, generator=generator).double() for _ in range(3))
    teacher, sampler = teacher_logits.log_softmax(-1), (logits + stale * drift).log_softmax(-1)
    mean_gradient = torch.zeros(vocabulary).double()
    for token in range(vocabulary):
        moving = logits.clone().requires_grad_(True)
        pack = {
            "packed_response_mask": torch.tensor([True]),
            "packed_logprobs": sampler[token].reshape(1),
            "packed_teacher_logprobs": teacher[token].reshape(1),
            "packed_advantages": torch.zeros(1).double(),
            "packed_seq_ids": torch.tensor([0]),
            "packed_num_sequences": 1,
        }
        knobs = PolicyLossConfig(rl_loss_weight=rl_weight, distill_loss_weight=0.5)
        loss, _ = policy_loss_fn(pack, moving.log_softmax(-1)[token].reshape(1), knobs)
        loss.backward()
        mean_gradient += sampler[token].exp() * moving.grad
    expected = 0.5 * exact_reverse_kl_gradient(logits, teacher)
    assert mean_gradient.tolist() == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-9)


# -- relations between members of the family --------------------------------------------------------------------------


@QUICK
@given(batch=batches())
def test_without_further_knobs_the_loss_equals_grpo(batch):
    loss, gradient, _ = run(batch, PolicyLossConfig(eps_clip=0.1, eps_clip_higher=0.3, c_clip=2.0))
    logprobs = batch.logprobs.detach().clone().requires_grad_(True)
    other, _ = grpo_loss_fn(batch.pack, logprobs, 0.1, clip_eps_high=0.3, dual_clip=2.0)
    other.backward()
    assert loss == float(other)
    assert torch.equal(gradient, logprobs.grad)


def test_every_surrogate_equals_the_plain_policy_gradient_before_the_policy_moves():
    batch = make_batch([4, 3], mask_share=1.0)
    batch.logprobs = batch.pack["packed_logprobs"].clone()
    expected = (-batch.pack["packed_advantages"] / 7).tolist()
    for knobs in (PolicyLossConfig(), PolicyLossConfig(use_cispo_loss=True), PolicyLossConfig(use_sapo_loss=True)):
        assert run(batch, knobs)[1].tolist() == pytest.approx(expected)


def test_a_loss_with_bound_knobs_can_be_pickled():
    loss_fn = partial(policy_loss_fn, knobs=PolicyLossConfig(c_clip=2.0, use_decoupled_loss=True), version=3)
    again = pickle.loads(pickle.dumps(loss_fn))
    assert (again.func, again.keywords) == (policy_loss_fn, loss_fn.keywords)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"eps_clip": -0.1}, "eps_clip must be non-negative, got -0.1"),
        ({"eps_clip_higher": -1.0}, "eps_clip_higher must be non-negative"),
        ({"c_clip": 1.0}, "c_clip must be above 1, got 1.0"),
        (
            {"importance_sampling_level": "turn"},
            "importance_sampling_level 'turn' is unknown; choose token, sequence",
        ),
        ({"prox_logp_method": "guess"}, "prox_logp_method 'guess' is unknown"),
        ({"sapo_tau_pos": 0.0}, "sapo_tau_pos must be positive"),
        ({"distill_loss_weight": -1.0}, "distill_loss_weight must not be negative"),
        ({"rl_loss_weight": 0.0}, "set at least one of these weights above 0"),
        ({"use_sapo_loss": True, "use_cispo_loss": True}, "are mutually exclusive"),
        ({"use_sapo_loss": True, "use_decoupled_loss": True}, "set use_decoupled_loss to false"),
        ({"use_sapo_loss": True, "c_clip": 3.0}, "c_clip 3.0 has no effect with use_sapo_loss"),
        ({"rejection_sampling": RejectionSampling()}, "rejection_sampling has no effect without use_decoupled_loss"),
        ({"m2_threshold": 0.04}, "m2_threshold needs proximal log-probs"),
        ({"prox_logp_method": "loglinear"}, "prox_logp_method loglinear has no effect without use_decoupled_loss"),
        ({"use_decoupled_loss": True, "m2_threshold": 0.0}, "m2_threshold must be positive"),
        (
            {"use_decoupled_loss": True, "m2_threshold": 0.04, "prox_logp_method": "loglinear"},
            "prox_logp_method to recompute or metrics",
        ),
    ],
)
def test_errors_name_bad_knobs_and_a_remedy(options, text):
    with pytest.raises(ValueError, match=text):
        PolicyLossConfig(**options)


@pytest.mark.parametrize(
    ("options", "missing", "text"),
    [
        ({"use_decoupled_loss": True}, "packed_prox_logprobs", "set prox_logprobs"),
        ({"use_decoupled_loss": True, "prox_logp_method": "linear"}, "packed_versions", "the engine recorded"),
        ({"use_decoupled_loss": True, "m2_threshold": 0.1}, "packed_keep", "select_by_second_moment"),
        ({"distill_loss_weight": 1.0}, "packed_teacher_logprobs", "set teacher_logprobs in every row"),
    ],
)
def test_a_batch_that_lacks_what_a_knob_reads_is_refused(options, missing, text):
    batch = make_batch([3, 3])
    del batch.pack[missing]
    with pytest.raises(ValueError, match=text):
        policy_loss_fn(batch.pack, batch.logprobs, PolicyLossConfig(**options), version=VERSION)


def test_an_approximation_needs_to_know_the_version():
    batch = make_batch([3])
    knobs = PolicyLossConfig(use_decoupled_loss=True, prox_logp_method="loglinear")
    with pytest.raises(ValueError, match="the engine's version plus one"):
        policy_loss_fn(batch.pack, batch.logprobs, knobs)


def test_proximal_log_probs_are_needed_only_if_the_knobs_read_them():
    needing = {
        (decoupled, method)
        for decoupled, method in itertools.product([False, True], ["recompute", "metrics", "loglinear"])
        if (decoupled or method == "recompute")
        and PolicyLossConfig(use_decoupled_loss=decoupled, prox_logp_method=method).needs_proximal
    }
    assert needing == {(True, "recompute"), (True, "metrics")}
