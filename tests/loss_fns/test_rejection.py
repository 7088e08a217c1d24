"""Weights and filters of stale tokens against loops over Python floats."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areno.loss_fns import RejectionSampling
from areno.loss_fns.rejection import behavior_weights, second_moment_keep
from tests.loss_fns.packs import QUICK, batches, make_batch


def bernoulli_divergence(p, b):
    p, b = (min(max(x, 1e-8), 1 - 1e-8) for x in (p, b))
    return p * math.log(p / b) + (1 - p) * math.log((1 - p) / (1 - b))


def metric_of(kind, prox, behave):
    d = prox - behave
    if kind in ("ratio", "kl_k1"):
        return d
    if kind == "kl_k2":
        return d * d / 2
    if kind == "kl_k3":
        return math.exp(d) - d - 1
    p, b = math.exp(prox), math.exp(behave)
    return max(bernoulli_divergence(p, b), bernoulli_divergence(b, p))


def expected(sampling, rows):
    """(weight, keep, outside) of each response token, one list per sequence."""
    result = []
    for row in rows:
        ds = [t["prox_logprobs"] - t["logprobs"] for t in row]
        values = [metric_of(sampling.metric, t["prox_logprobs"], t["logprobs"]) for t in row]
        weights = [math.exp(d) for d in ds]
        if sampling.level == "sequence" and row:
            one = {"sum": sum(values), "mean": sum(values) / len(row), "max": max(values)}[sampling.agg]
            values = [one] * len(row)
            if sampling.metric == "ratio":
                weights = [math.exp(sum(ds) / len(ds))] * len(row)
        if sampling.metric == "ratio":
            values = [math.exp(v) for v in values]
        lower = -math.inf if sampling.lower is None else sampling.lower
        inside = [lower <= v <= sampling.upper for v in values]
        if sampling.action == "mask":
            result.append([(w if ok else 0.0, ok, not ok) for w, ok in zip(weights, inside, strict=True)])
        else:
            limited = [min(max(w, max(lower, 0.0)), sampling.upper) for w in weights]
            pairs = zip(weights, limited, inside, strict=True)
            result.append([(w if ok else bounded, True, not ok and bounded != w) for w, bounded, ok in pairs])
    return result


@st.composite
def samplings(draw):
    metric = draw(st.sampled_from(["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"]))
    level = draw(st.sampled_from(["token", "sequence"]))
    lowers = {"ratio": [None, 0.7], "kl_k1": [None, -0.3]}.get(metric, [None, 0.001])
    return RejectionSampling(
        level=level,
        action=draw(st.sampled_from(["mask", "clamp"])) if metric == "ratio" else "mask",
        metric=metric,
        agg=draw(st.sampled_from(["sum", "mean", "max"])) if level == "sequence" else "mean",
        upper=draw(st.sampled_from([1.2, 5.0] if metric == "ratio" else [0.05, 0.5])),
        lower=draw(st.sampled_from(lowers)),
    )


@QUICK
@given(sampling=samplings(), batch=batches(shifts=(0.05, 0.5, 2.0)))
def test_weights_and_filters_equal_their_formulas(sampling, batch):
    behavior = behavior_weights(sampling, batch.pack, batch.pack["packed_prox_logprobs"], batch.pack["packed_logprobs"])
    mask = batch.pack["packed_response_mask"]
    tokens = [token for row in expected(sampling, batch.rows) for token in row]
    assert behavior.weight[mask].tolist() == pytest.approx([w for w, _, _ in tokens], rel=1e-6, abs=1e-12)
    assert behavior.keep[mask].tolist() == [keep for _, keep, _ in tokens]
    assert behavior.outside[mask].tolist() == [outside for _, _, outside in tokens]
    assert not (behavior.keep | behavior.outside | (behavior.weight != 0))[~mask].any()


@QUICK
@given(batch=batches())
def test_without_bounds_every_token_keeps_its_ratio_as_weight(batch):
    prox, behave = batch.pack["packed_prox_logprobs"], batch.pack["packed_logprobs"]
    behavior = behavior_weights(None, batch.pack, prox, behave)
    mask = batch.pack["packed_response_mask"]
    assert behavior.weight[mask].tolist() == pytest.approx((prox - behave).exp()[mask].tolist(), rel=1e-9)
    assert torch.equal(behavior.keep, mask)


def one_sequence(*differences):
    """A pack of one sequence whose proximal log-probs differ by ``differences`` from the behavior log-probs of -1."""
    batch = make_batch([len(differences)], mask_share=1.0)
    behave = torch.full((len(differences),), -1.0, dtype=torch.float64)
    return batch.pack, behave + torch.tensor(differences, dtype=torch.float64), behave


def test_bounds_are_inclusive():
    pack, prox, behave = one_sequence(0.5, -0.25, 0.5 + 1e-9)
    keep = behavior_weights(RejectionSampling(metric="kl_k1", upper=0.5, lower=-0.25), pack, prox, behave).keep
    assert keep.tolist() == [True, True, False]


def test_a_lower_bound_of_zero_is_applied():
    pack, prox, behave = one_sequence(-0.1, 0.1)
    keep = behavior_weights(RejectionSampling(metric="kl_k1", upper=0.5, lower=0.0), pack, prox, behave).keep
    assert keep.tolist() == [False, True]


def test_k3_is_r_minus_log_r_minus_one_and_not_its_mirror_image():
    # r = e: e - 2 = 0.718; r = 1/e: 1/e = 0.368. The mirrored form exp(-d) + d - 1 would swap them.
    pack, prox, behave = one_sequence(1.0, -1.0)
    assert behavior_weights(RejectionSampling(metric="kl_k3", upper=0.5), pack, prox, behave).keep.tolist() == [
        False,
        True,
    ]


def test_log_prob_differences_that_are_not_finite_count_as_zero():
    pack, prox, behave = one_sequence(math.nan, math.inf, 0.1)
    behavior = behavior_weights(RejectionSampling(upper=2.0), pack, prox, behave)
    assert behavior.weight.tolist() == pytest.approx([1.0, 1.0, math.exp(0.1)])


def test_clamping_keeps_all_tokens_and_a_weight_within_the_bounds():
    clamp = RejectionSampling(level="sequence", action="clamp", agg="max", upper=1.5)
    pack, prox, behave = one_sequence(0.5, -0.3)
    behavior = behavior_weights(clamp, pack, prox, behave)
    # The largest ratio, 1.65, is outside the bounds, but the weight, the geometric mean 1.105, is not: nothing is clamped.
    assert behavior.outside.tolist() == [False, False]
    assert behavior.weight.tolist() == pytest.approx([math.exp(0.1)] * 2)
    assert behavior.keep.tolist() == [True, True]


@pytest.mark.parametrize(("agg", "differences", "changed"), [("sum", (0.3, 0.3), False), ("sum", (0.9, 0.9), True)])
def test_a_sequence_counts_as_filtered_where_clamping_changes_its_weight(agg, differences, changed):
    clamp = RejectionSampling(level="sequence", action="clamp", agg=agg, upper=1.5)
    behavior = behavior_weights(clamp, *one_sequence(*differences))
    assert behavior.outside.tolist() == [changed, changed]
    assert behavior.weight.tolist() == pytest.approx([min(math.exp(sum(differences) / 2), 1.5)] * 2)


def m2po(rows, threshold):
    """Keep flags, by removing the largest squares one by one."""
    tokens = sorted(((p - b) ** 2, i) for i, (p, b, counts) in enumerate(rows) if counts)
    while len(tokens) > 1 and sum(m for m, _ in tokens) / len(tokens) >= threshold:
        tokens.pop()
    return [i in {i for _, i in tokens} for i in range(len(rows))]


moves = st.lists(st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.booleans()), max_size=15)


@QUICK
@given(rows=moves, threshold=st.sampled_from([1e-4, 0.04, 1.0]))
def test_m2po_drops_the_tokens_that_moved_most_until_the_mean_is_below_the_threshold(rows, threshold):
    columns = [torch.tensor([row[k] for row in rows], dtype=torch.float64) for k in range(2)]
    mask = torch.tensor([row[2] for row in rows], dtype=torch.bool)
    keep = second_moment_keep(*columns, mask, threshold)
    squares = (columns[0] - columns[1]).square()
    wanted = torch.tensor(m2po(rows, threshold), dtype=torch.bool)
    # Ties between equal squares may be broken either way.
    assert squares[keep].sort()[0].tolist() == pytest.approx(squares[wanted].sort()[0].tolist())
    assert not (keep & ~mask).any()
    assert int(keep.sum()) >= min(1, int(mask.sum()))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"level": "word"}, "level 'word' is unknown; choose token, sequence"),
        ({"action": "drop"}, "action 'drop' is unknown"),
        ({"metric": "k3"}, "metric 'k3' is unknown"),
        ({"agg": "min"}, "agg 'min' is unknown"),
        ({"upper": 1.0}, "upper 1.0 would reject every increase in probability"),
        ({"lower": 0.0}, "lower 0.0 has no effect, because the ratio is always positive"),
        ({"metric": "kl_k2", "upper": 0.0}, "because kl_k2 is then positive"),
        ({"metric": "kl_k1", "upper": -1.0, "lower": 0.0}, "lower 0.0 is above upper -1.0"),
        ({"agg": "sum"}, "agg sum has no effect if level is token"),
        ({"metric": "kl_k3", "action": "clamp"}, "clamp works only with metric=ratio, but metric is kl_k3"),
    ],
)
def test_errors_name_bad_bounds(options, text):
    with pytest.raises(ValueError, match=text):
        RejectionSampling(**options)


def test_bounds_can_be_pickled():
    settings = RejectionSampling(level="sequence", agg="sum", metric="kl_k1", upper=-0.5)
    assert pickle.loads(pickle.dumps(settings)) == settings
