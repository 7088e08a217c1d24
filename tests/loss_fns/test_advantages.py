"""Advantage estimators against numpy, where they are exactly zero, and their registry."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areno.config.advantages import get_advantage, list_advantages, register_advantage
from areno.loss_fns import compute_group_advantages
from tests.loss_fns.packs import QUICK

BUILT_IN = ["batch", "group", "group_mean", "rloo"]
samples = st.lists(st.tuples(st.floats(-10, 10).map(lambda x: round(x, 3)), st.integers(0, 3)), max_size=12)


def written_out(name, rewards, groups):
    result = []
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        own = np.array([r for r, g in zip(rewards, groups, strict=True) if g == group])
        others = [r for i, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and i != index]
        if name == "group":
            result.append((reward - own.mean()) / (own.std() + 1e-8))
        elif name == "group_mean":
            result.append(reward - own.mean())
        elif name == "rloo":
            result.append(reward - np.mean(others) if others else 0.0)
        else:
            result.append((reward - np.mean(rewards)) / (np.std(rewards) + 1e-8))
    return result


@pytest.mark.parametrize("name", BUILT_IN)
@QUICK
@given(drawn=samples)
def test_each_estimator_equals_its_formula(name, drawn):
    rewards, groups = [r for r, _ in drawn], [g for _, g in drawn]
    expected = written_out(name, rewards, groups)
    assert get_advantage(name)(rewards, groups) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("value", [0.9, 0.3, 0.1, -1 / 3, 1e9, 0.0])
@pytest.mark.parametrize("size", [1, 3, 6, 8])
def test_equal_rewards_give_exactly_zero(name, value, size):
    assert get_advantage(name)([value] * size, [0] * size) == [0.0] * size
    assert compute_group_advantages([value] * size) == [0.0] * size


@pytest.mark.parametrize("name", ["group", "group_mean", "rloo"])
def test_advantages_of_a_tied_group_are_exactly_zero_next_to_an_untied_one(name):
    advantages = get_advantage(name)([0.9, 1.0, 0.9, 0.0, 0.9], [7, 2, 7, 2, 7])
    assert [advantages[i] for i in (0, 2, 4)] == [0.0] * 3
    assert advantages[1] > 0 > advantages[3]


def test_only_the_batch_estimator_compares_prompts():
    rewards, groups = [1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1]
    assert get_advantage("batch")(rewards, groups) == pytest.approx([1, 1, -1, -1])
    for name in ("group", "group_mean", "rloo"):
        assert get_advantage(name)(rewards, groups) == [0.0] * 4


def test_group_advantages_use_the_eps_argument_and_accept_an_empty_list():
    assert compute_group_advantages([0.0, 2.0], eps=1.0) == pytest.approx([-0.5, 0.5])
    assert compute_group_advantages([]) == []


def test_huge_and_tiny_rewards_stay_finite():
    for scale in (1e200, 1e-200):
        for name in BUILT_IN:
            advantages = get_advantage(name)([0.0, scale, scale], [0, 0, 0])
            assert all(math.isfinite(a) for a in advantages)
            assert advantages[0] < 0 < advantages[1]


@pytest.mark.parametrize("name", BUILT_IN)
def test_bad_rewards_are_refused(name):
    with pytest.raises(ValueError, match="2 rewards and 1 group indices"):
        get_advantage(name)([1.0, 2.0], [0])
    with pytest.raises(ValueError, match="reward 1 is nan, but advantages need finite rewards"):
        get_advantage(name)([1.0, math.nan], [0, 0])


def test_an_unknown_estimator_is_refused_with_the_known_names():
    with pytest.raises(ValueError, match="'median' is unknown; choose one of: batch, group, group_mean, rloo"):
        get_advantage("median")


def test_an_estimator_can_be_added_and_replaced_but_not_by_accident(monkeypatch):
    monkeypatch.setattr("areno.config.advantages._REGISTRY", dict.fromkeys(BUILT_IN))
    register_advantage("signs", lambda rewards, groups: [math.copysign(1, r) for r in rewards])
    assert get_advantage("signs")([3.0, -2.0], [0, 0]) == [1.0, -1.0]
    assert list_advantages() == sorted([*BUILT_IN, "signs"])
    with pytest.raises(ValueError, match="'signs' is already registered; choose another name, or pass replace=True"):
        register_advantage("signs", get_advantage("signs"))
    register_advantage("signs", lambda rewards, groups: [0.0] * len(rewards), replace=True)
    assert get_advantage("signs")([3.0], [0]) == [0.0]
