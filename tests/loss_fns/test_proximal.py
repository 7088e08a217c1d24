"""Approximations of the proximal policy against their formulas and against policies that move linearly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from areno.loss_fns.proximal import APPROXIMATIONS, approximate_proximal, approximation_metrics, interpolation_fraction
from tests.loss_fns.packs import QUICK, VERSION, batches, value_of
from tests.loss_fns.written_out import mean
from tests.loss_fns.written_out_family import approximation
from tests.loss_fns.written_out_family import interpolation_fraction as fraction_written_out

EXACT = {"rel": 1e-6, "abs": 1e-9}


def test_the_interpolation_fraction_for_each_token_version():
    versions = torch.tensor([-1, 0, 3, 4, 5, 6])
    assert interpolation_fraction(versions, 6).tolist() == pytest.approx([0.0, 5 / 6, 2 / 3, 1 / 2, 0.0, 0.0])
    assert interpolation_fraction(versions, 6).tolist() == [fraction_written_out(v, 6) for v in versions.tolist()]


@pytest.mark.parametrize("kind", APPROXIMATIONS)
@QUICK
@given(batch=batches())
def test_an_approximation_equals_its_formula(kind, batch):
    approximated = approximate_proximal(
        kind, batch.pack["packed_logprobs"], batch.logprobs, batch.pack["packed_versions"], VERSION
    )
    tokens = [token | {"x0": token["x"]} for row in batch.rows for token in row]
    expected = [approximation(kind, token, VERSION) for token in tokens]
    assert approximated[batch.pack["packed_response_mask"]].tolist() == pytest.approx(expected, **EXACT)
    assert not approximated.requires_grad


def test_an_approximation_is_exact_if_log_probs_or_probabilities_change_linearly():
    # -0.1 per version: a token at -1.0 in version 2 is at -1.3 at the start of the update to version 6, and at -1.4 after it.
    start = approximate_proximal("loglinear", torch.tensor([-1.0]), torch.tensor([-1.4]), torch.tensor([2]), 6)
    assert float(start) == pytest.approx(-1.3)
    rising = approximate_proximal("linear", torch.tensor([0.1]).log(), torch.tensor([0.5]).log(), torch.tensor([2]), 6)
    assert float(rising.exp()) == pytest.approx(0.4)


def test_the_linear_form_stays_finite_for_distant_log_probs():
    far = approximate_proximal(
        "linear", torch.tensor([-200.0, 0.0]), torch.tensor([0.0, -200.0]), torch.tensor([0, 0]), 6
    )
    assert torch.isfinite(far).all()


def test_an_error_names_an_unknown_kind():
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="'cubic' is unknown; choose one of: loglinear, linear, rollout"):
        approximate_proximal("cubic", one, one, one.long(), 1)


@QUICK
@given(batch=batches())
def test_metrics_compare_each_approximation_with_the_forward_pass(batch):
    pack = batch.pack
    metrics = approximation_metrics(
        pack["packed_logprobs"],
        batch.logprobs,
        pack["packed_prox_logprobs"],
        pack["packed_versions"],
        VERSION,
        pack["packed_response_mask"],
    )
    tokens = [token | {"x0": token["x"]} for row in batch.rows for token in row]
    expected = {}

    def note(name, value):
        expected.setdefault(f"compute_logp/{name}", []).append(value)

    for t in tokens:
        d = t["logprobs"] - t["prox_logprobs"]
        note("prox_logp_gt", t["prox_logprobs"])
        note("kl_div_direct", d)
        note("kl_div_taylor", d * d / 2)
        note("kl_div_dual", math.exp(-d) - 1 + d)
        for kind in APPROXIMATIONS:
            guess = approximation(kind, t, VERSION)
            error = abs(guess - t["prox_logprobs"])
            behave, new = math.exp(guess - t["logprobs"]), math.exp(t["x"] - guess)
            true_behave, true_new = math.exp(-d), math.exp(t["x"] - t["prox_logprobs"])
            note(f"{kind}/approx_logp", guess)
            note(f"{kind}/abs_error", error)
            note(f"{kind}/rel_error", error / abs(t["prox_logprobs"]))
            note(f"{kind}/squared_error", error**2)
            note(f"{kind}/behave_imp_weight", behave)
            note(f"{kind}/importance_weight", new)
            note(f"{kind}/behave_imp_weight_abs_error", abs(behave - true_behave))
            note(f"{kind}/behave_imp_weight_rel_error", abs(behave - true_behave) / true_behave)
            note(f"{kind}/importance_weight_abs_error", abs(new - true_new))
            note(f"{kind}/importance_weight_rel_error", abs(new - true_new) / true_new)
    assert not tokens or set(expected) == set(metrics)
    for name, numbers in expected.items():
        assert value_of(metrics[name]) == pytest.approx(mean(numbers), **EXACT), name
