"""The critic's loss and the supervised loss against their formulas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areno.loss_fns import sft_loss_fn, value_loss_fn
from tests.loss_fns import written_out
from tests.loss_fns.packs import QUICK, batches, make_batch, value_of

EXACT = {"rel": 1e-6, "abs": 1e-9}


@QUICK
@given(batch=batches(), eta=st.sampled_from([0.1, 0.5, 100.0]), coef=st.sampled_from([0.5, 2.0]))
def test_the_value_loss_equals_its_formula(batch, eta, coef):
    loss, metrics = value_loss_fn(batch.pack, batch.logprobs, eta, coef)
    expected = written_out.value(batch.rows, eta, coef)
    assert float(loss) == pytest.approx(expected, **EXACT)
    assert value_of(metrics["value_loss"]) == pytest.approx(expected, **EXACT)


@QUICK
@given(batch=batches())
def test_value_statistics_describe_the_predictions(batch):
    _, metrics = value_loss_fn(batch.pack, batch.logprobs, 0.5)
    tokens = [t for row in batch.rows for t in row]

    def clipped(t):
        limited = t["values"] + min(max(t["x"] - t["values"], -0.5), 0.5)
        return (limited - t["returns"]) ** 2 > (t["x"] - t["returns"]) ** 2 + 1e-12

    expected = {
        "value_clipfrac": written_out.mean([float(clipped(t)) for t in tokens]),
        "value_mse": written_out.mean([(t["x"] - t["returns"]) ** 2 for t in tokens]),
        "value_pred_mean": written_out.mean([t["x"] for t in tokens]),
        "value_target_mean": written_out.mean([t["returns"] for t in tokens]),
        "old_value_mean": written_out.mean([t["values"] for t in tokens]),
        "value_abs_error_mean": written_out.mean([abs(t["x"] - t["returns"]) for t in tokens]),
    }
    assert {name: value_of(metrics[name]) for name in expected} == pytest.approx(expected, **EXACT)


def test_a_prediction_that_moved_far_enough_towards_its_target_gets_no_gradient():
    batch = make_batch([3], mask_share=1.0)
    batch.pack["packed_values"], batch.pack["packed_returns"] = torch.zeros(3), torch.full((3,), 2.0)
    values = torch.tensor([0.3, 0.9, -0.9], requires_grad=True)
    loss, metrics = value_loss_fn(batch.pack, values, 0.5, 1.0)
    loss.backward()
    assert value_of(metrics["value_clipfrac"]) == pytest.approx(1 / 3)
    assert values.grad.tolist() == pytest.approx([(0.3 - 2) / 3, 0.0, (-0.9 - 2) / 3])


@pytest.mark.parametrize("missing", ["packed_values", "packed_returns"])
def test_a_batch_without_targets_is_refused(missing):
    batch = make_batch([3])
    del batch.pack[missing]
    with pytest.raises(ValueError, match=f"value_loss_fn needs {missing}.*set `values` and `returns` in every row"):
        value_loss_fn(batch.pack, batch.logprobs)


def test_a_clip_range_of_zero_is_refused():
    batch = make_batch([3])
    with pytest.raises(ValueError, match=r"cliprange_value must be above 0, got 0\.0"):
        value_loss_fn(batch.pack, batch.logprobs, 0.0)


@QUICK
@given(batch=batches())
def test_sft_is_the_mean_negative_log_likelihood_of_the_targets(batch):
    loss, metrics = sft_loss_fn(batch.pack, batch.logprobs)
    mean = written_out.mean([t["x"] for row in batch.rows for t in row])
    assert float(loss) == pytest.approx(-mean, **EXACT)
    assert value_of(metrics["sft_loss"]) == pytest.approx(-mean, **EXACT)
    assert value_of(metrics["sft_logprob_mean"]) == pytest.approx(mean, **EXACT)
    assert value_of(metrics["sft_target_tokens"]) == sum(map(len, batch.rows))
