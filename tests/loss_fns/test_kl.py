"""KL estimators: against their formulas, against an exact divergence, and what a gradient step on each does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areno.loss_fns import kl_penalty
from tests.loss_fns import written_out
from tests.loss_fns.packs import QUICK, slopes

KINDS = ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]


@pytest.mark.parametrize("kind", KINDS)
@QUICK
@given(pairs=st.lists(st.tuples(st.floats(-60, 0), st.floats(-60, 0)), max_size=8))
def test_each_estimator_equals_its_formula(kind, pairs):
    new, ref = (torch.tensor([p[i] for p in pairs], dtype=torch.float64) for i in (0, 1))
    expected = [written_out.kl(kind, *pair) for pair in pairs]
    assert kl_penalty(new, ref, kind).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_finite_differences(kind):
    ref = torch.linspace(-3, -0.5, 12, dtype=torch.float64)
    new = (ref + torch.linspace(-1.1, 1.3, 12, dtype=torch.float64)).requires_grad_(True)
    kl_penalty(new, ref, kind).sum().backward()
    assert new.grad.tolist() == pytest.approx(slopes(lambda x: kl_penalty(x, ref, kind).sum(), new), abs=1e-7)


@pytest.mark.parametrize(("kind", "exact"), [("kl", True), ("low_var_kl", True), ("mse", False), ("abs", False)])
def test_the_expectation_of_unbiased_estimators_is_the_exact_divergence(kind, exact):
    torch.manual_seed(0)
    policy, reference = (torch.log_softmax(torch.randn(50, dtype=torch.float64) / 2, -1) for _ in range(2))
    divergence = float((policy.exp() * (policy - reference)).sum())
    expected = float((policy.exp() * kl_penalty(policy, reference, kind)).sum())
    assert (expected == pytest.approx(divergence, rel=1e-9)) == exact


@pytest.mark.parametrize("kind", ["abs", "mse", "low_var_kl"])
@pytest.mark.parametrize("gap", [-0.7, 0.7])
def test_a_gradient_step_leads_back_to_the_reference(kind, gap):
    ref = torch.tensor([-2.0], dtype=torch.float64)
    new = (ref + gap).requires_grad_(True)
    kl_penalty(new, ref, kind).sum().backward()
    assert math.copysign(1, float(new.grad)) == math.copysign(1, gap)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gap", [0.0, 1e-8, 50.0, -50.0, 1e4, -1e4])
def test_extreme_gaps_stay_finite_in_single_precision(kind, gap):
    new = torch.full((3,), -1.0, requires_grad=True)
    penalty = kl_penalty(new, torch.full((3,), -1.0 - gap), kind)
    penalty.sum().backward()
    assert torch.isfinite(penalty).all()
    assert torch.isfinite(new.grad).all()


def test_the_low_variance_estimator_is_bounded_and_never_negative():
    gaps = torch.cat([torch.linspace(-30, 30, 601), torch.logspace(-9, -1, 40), -torch.logspace(-9, -1, 40)])
    penalty = kl_penalty(gaps, torch.zeros_like(gaps), "low_var_kl")
    assert float(penalty.min()) >= 0.0
    assert float(penalty.max()) == 10.0


def test_half_precision_is_upcast_before_the_subtraction():
    new, ref = torch.tensor([-1.0078125], dtype=torch.bfloat16), torch.tensor([-1.0], dtype=torch.bfloat16)
    penalty = kl_penalty(new, ref, "mse")
    assert penalty.dtype == torch.float32
    assert float(penalty) == pytest.approx(0.5 * 0.0078125**2, rel=1e-6)


def test_an_unknown_estimator_is_refused_with_the_known_names():
    with pytest.raises(ValueError, match="'k4' is unknown; choose one of: kl, k1, abs, mse, k2, low_var_kl, k3"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
