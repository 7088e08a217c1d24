"""Norm against loops over exact fractions, and edge cases that the formula leaves open."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from areno.loss_fns import Norm
from tests.loss_fns.packs import QUICK

levels = st.sampled_from(["batch", "group", None])


@st.composite
def norms(draw):
    mean_level = draw(levels)
    return Norm(
        mean_level=mean_level,
        mean_leave1out=mean_level is not None and draw(st.booleans()),
        std_level=draw(levels),
        std_unbiased=draw(st.booleans()),
        eps=draw(st.sampled_from([1e-5, 1e-2])),
    )


entries = st.lists(
    st.tuples(st.floats(-5, 5).map(lambda x: round(x, 3)), st.sampled_from([7, -1, 40]), st.booleans()),
    min_size=1,
    max_size=12,
)


def normalized(norm, values, groups, mask):
    """The formula in exact fractions up to the square root."""
    n = len(values)
    if not any(mask):
        return list(values)
    exact = [Fraction(v) for v in values]

    def peers(level, i):
        return [j for j in range(n) if mask[j] and (level == "batch" or groups[j] == groups[i])]

    def mu(i):
        if norm.mean_level is None:
            return Fraction(0)
        members = peers(norm.mean_level, i)
        if not norm.mean_leave1out:
            return sum(exact[j] for j in members) / len(members)
        others = [j for j in members if j != i]
        return sum(exact[j] for j in others) / len(others) if others else Fraction(0)

    def sigma(i):
        members = peers(norm.std_level, i)
        degrees = len(members) - norm.std_unbiased
        if degrees == 0:
            return 1.0
        return math.sqrt(float(sum((exact[j] - mu(j)) ** 2 for j in members) / degrees))

    result = []
    for i in range(n):
        if not mask[i]:
            result.append(0.0)
        elif norm.std_level is None:
            result.append(float(exact[i] - mu(i)))
        else:
            result.append(float(exact[i] - mu(i)) / (sigma(i) + norm.eps))
    return result


@QUICK
@given(norm=norms(), rows=entries)
@example(norm=Norm("group", True, "group"), rows=[(2.0, 7, True), (3.0, -1, True)])
@example(norm=Norm("group", False, "batch"), rows=[(0.1, 7, True)] * 3 + [(0.7, -1, True)] * 2)
@example(norm=Norm(), rows=[(2.0, 7, False), (3.0, -1, False)])
def test_a_norm_equals_its_formula(norm, rows):
    values, groups, mask = (list(column) for column in zip(*rows, strict=True))
    result = norm(values, groups, mask)
    assert result.dtype == torch.float64
    assert result.tolist() == pytest.approx(normalized(norm, values, groups, mask), rel=1e-9, abs=1e-9)


@QUICK
@given(norm=norms(), rows=entries, seed=st.randoms(use_true_random=False))
def test_groups_are_identified_by_id_regardless_of_the_order_of_entries(norm, rows, seed):
    order = list(range(len(rows)))
    seed.shuffle(order)
    plain = norm(*zip(*rows, strict=True)).tolist()
    shuffled = norm(*zip(*[rows[i] for i in order], strict=True)).tolist()
    assert shuffled == pytest.approx([plain[i] for i in order], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e10])
@pytest.mark.parametrize("norm", [Norm(), Norm("group", std_level="group", eps=0.0), Norm("group", True, None)])
def test_equal_values_become_exactly_zero_whatever_they_are(norm, value):
    assert norm([value] * 3, [0] * 3).tolist() == [0.0] * 3


def test_a_lone_answer_keeps_its_value_with_leave_one_out():
    assert Norm("group", True, None)([3.0, 1.0, 2.0], [0, 1, 1]).tolist() == [3.0, -1.0, 1.0]
    assert Norm("group", True, "group", eps=0.0)([3.0], [0]).tolist() == [3.0]
    assert Norm("group", False, "group")([3.0], [0]).tolist() == [0.0]


def test_norms_of_named_algorithms_on_a_handmade_batch():
    values, groups = [1.0, 0.0, 0.0, 1.0, 1.0], [0, 0, 0, 1, 1]
    dr_grpo, rloo = Norm("group", std_level=None), Norm("group", True, None)
    assert dr_grpo(values, groups).tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0.0, 0.0])
    assert rloo(values, groups).tolist() == pytest.approx([1.0, -0.5, -0.5, 0.0, 0.0])
    lite = Norm("group", std_level="batch")(values, groups).tolist()
    assert lite[0] == pytest.approx(2 / 3 / (math.sqrt(6 / 9 / 4) + 1e-5))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mean_level": "prompt"}, "mean_level must be batch, group or null, got 'prompt'"),
        ({"std_level": "none"}, "std_level must be batch, group or null, got 'none'"),
        ({"mean_level": None, "mean_leave1out": True}, "mean_leave1out has no effect without a mean"),
        ({"eps": -1.0}, "eps of a norm must not be negative, got -1.0"),
    ],
)
def test_errors_name_bad_settings(options, text):
    with pytest.raises(ValueError, match=text):
        Norm(**options)


def test_bad_numbers_are_refused_unless_masked():
    with pytest.raises(ValueError, match="finite"):
        Norm()([1.0, math.nan], [0, 0])
    assert Norm(None, std_level=None)([1.0, math.nan], [0, 0], [True, False]).tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="must be one-dimensional and equally long"):
        Norm()([1.0, 2.0], [0])


def test_a_norm_can_be_pickled():
    assert pickle.loads(pickle.dumps(Norm("group", True, None))) == Norm("group", True, None)
