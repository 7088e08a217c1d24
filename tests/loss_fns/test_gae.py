"""GAE against its double sum and at the extremes of lambda, and whitening."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areno.loss_fns import compute_gae, whiten
from tests.loss_fns.packs import QUICK

EXACT = {"rel": 1e-6, "abs": 1e-9}
tokens = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), max_size=12)


def written_out_gae(rewards, values, gamma, lam, next_value):
    """A_t = sum over l of (gamma lam)^l d_{t+l}, one sum per token."""
    after = [*values, next_value][1:]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [
        sum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, len(deltas))) for t in range(len(deltas))
    ]


@QUICK
@given(
    pairs=tokens,
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    next_value=st.sampled_from([0.0, 1.5]),
)
def test_advantages_equal_their_double_sum_and_returns_add_the_values(pairs, gamma, lam, next_value):
    rewards, values = [r for r, _ in pairs], [v for _, v in pairs]
    advantages, returns = compute_gae(rewards, values, gamma=gamma, lam=lam, next_value=next_value)
    expected = written_out_gae(rewards, values, gamma, lam, next_value)
    assert advantages == pytest.approx(expected, **EXACT)
    assert returns == pytest.approx([a + v for a, v in zip(expected, values, strict=True)], **EXACT)


@QUICK
@given(pairs=tokens.filter(bool), gamma=st.sampled_from([0.5, 1.0]), next_value=st.sampled_from([0.0, 2.0]))
def test_with_lambda_one_the_returns_are_discounted_rewards(pairs, gamma, next_value):
    rewards = [r for r, _ in pairs]
    _, returns = compute_gae(rewards, [v for _, v in pairs], gamma=gamma, lam=1.0, next_value=next_value)
    discounted = [
        sum(gamma ** (i - t) * rewards[i] for i in range(t, len(rewards))) + gamma ** (len(rewards) - t) * next_value
        for t in range(len(rewards))
    ]
    assert returns == pytest.approx(discounted, **EXACT)


def test_a_reward_at_the_end_reaches_every_token():
    advantages, returns = compute_gae([0, 0, 0, 1.0], [0.0] * 4, gamma=1.0, lam=0.95)
    assert advantages == pytest.approx([0.95**3, 0.95**2, 0.95, 1.0])
    assert returns == advantages


def test_a_perfect_critic_leaves_no_advantage():
    advantages, returns = compute_gae([0, 0, 1.0], [1.0, 1.0, 1.0], gamma=1.0, lam=0.95)
    assert advantages == [0.0] * 3
    assert returns == [1.0] * 3


def test_bootstrapping_replaces_the_future_reward_of_a_truncated_answer():
    cut, finished = (compute_gae([0.0], [0.4], gamma=0.9, lam=0.95, next_value=v)[0][0] for v in (1.0, 0.0))
    assert (cut, finished) == pytest.approx((0.9 - 0.4, -0.4))


def test_an_empty_and_a_one_token_response():
    assert compute_gae([], [], gamma=1.0, lam=0.95) == ([], [])
    assert compute_gae([2.0], [0.5], gamma=1.0, lam=0.95) == ([1.5], [2.0])


def test_different_lengths_are_refused_and_both_reported():
    with pytest.raises(ValueError, match="3 rewards and 2 values"):
        compute_gae([0.0] * 3, [0.0] * 2, gamma=1.0, lam=0.95)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gamma": 1.1, "lam": 0.9}, r"gamma must be between 0 and 1, got 1\.1"),
        ({"gamma": 1.0, "lam": -0.1}, r"lam must be between 0 and 1, got -0\.1"),
        ({"gamma": 1.0, "lam": 0.9, "next_value": math.nan}, "finite next_value"),
    ],
)
def test_bad_constants_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        compute_gae([1.0], [0.0], **arguments)


def test_numbers_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="GAE needs finite rewards"):
        compute_gae([math.inf], [0.0], gamma=1.0, lam=0.9)
    with pytest.raises(ValueError, match="GAE needs finite values"):
        compute_gae([1.0], [math.nan], gamma=1.0, lam=0.9)


@QUICK
@given(
    rows=st.lists(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), max_size=6), max_size=5),
)
def test_whitening_standardizes_the_kept_tokens_of_all_rows_together(rows):
    values = [[v for v, _ in row] for row in rows]
    masks = [[m for _, m in row] for row in rows]
    kept = np.array([v for row in rows for v, keep in row if keep])
    mean, std = (kept.mean(), kept.std()) if len(kept) else (0.0, 0.0)
    scale = std if std > 1e-6 else 1.0
    expected = [[(v - mean) / scale if keep else 0.0 for v, keep in row] for row in rows]
    whitened = whiten(values, masks)
    assert [len(row) for row in whitened] == [len(row) for row in expected]
    flat = [v for row in expected for v in row]
    assert [v for row in whitened for v in row] == pytest.approx(flat, rel=1e-6, abs=1e-6)


def test_masked_tokens_become_zero_and_do_not_count():
    assert whiten([[3.0, 1e9], [1.0]], [[True, False], [True]]) == [[1.0, 0.0], [-1.0]]


@pytest.mark.parametrize("value", [0.9, 0.3, 0.1, -1 / 3, 1e9])
@pytest.mark.parametrize("size", [1, 4, 5, 10])
def test_equal_values_become_exactly_zero(value, size):
    rows = [[value] * 2, [value] * size]
    assert whiten(rows, [[True] * 2, [True] * size]) == [[0.0] * 2, [0.0] * size]


def test_a_tiny_deviation_is_not_blown_up():
    whitened = whiten([[1.0, 1.0 + 1e-7]], [[True, True]])[0]
    assert whitened == pytest.approx([-0.5e-7, 0.5e-7], rel=1e-6)


def test_whitening_nothing_or_a_single_token_does_not_divide_by_zero():
    assert whiten([], []) == []
    assert whiten([[1.0, 2.0]], [[False, False]]) == [[0.0, 0.0]]
    assert whiten([[5.0]], [[True]]) == [[0.0]]


def test_masks_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"rows have lengths \[2\] and the masks have lengths \[1\]"):
        whiten([[1.0, 2.0]], [[True]])
