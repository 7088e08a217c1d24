"""Shares of rows: complete, disjoint, the same everywhere, and of nearly equal weight."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from areno.engine.parallel.balance import shares, shares_of_rows

weights = st.lists(st.integers(0, 500), max_size=40)
parts = st.integers(1, 5)


@given(weights, parts)
def test_every_item_is_in_one_share(values, count):
    found = shares(values, count)
    assert len(found) == count
    assert sorted(index for share in found for index in share) == list(range(len(values)))
    assert all(share == sorted(share) for share in found)


@given(weights, parts)
def test_shares_differ_by_no_more_than_the_largest_item(values, count):
    sums = [sum(values[i] for i in share) for share in shares(values, count)]
    assert max(sums) - min(sums) <= max(values, default=0)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7))
def test_two_shares_are_close_to_the_optimum(values):
    sides = product((0, 1), repeat=len(values))
    best = min(max(sum(v for v, s in zip(values, side, strict=True) if s == k) for k in (0, 1)) for side in sides)
    heaviest = max(sum(values[i] for i in share) for share in shares(values, 2))
    assert heaviest <= best * 7 / 6  # the method's bound for two shares


@given(st.lists(st.integers(1, 90), max_size=12), parts)
def test_pairs_stay_together(pairs, count):
    lengths = [length for pair in pairs for length in (pair, pair + 3)]
    for share in shares_of_rows(lengths, count, together=2):
        assert share[1::2] == [index + 1 for index in share[::2]]


def test_known_cases():
    assert shares([5, 5, 5, 5], 2) in ([[0, 2], [1, 3]], [[0, 3], [1, 2]], [[0, 1], [2, 3]])
    assert sorted(shares([9], 3)) == [[], [], [0]]
    assert shares([8, 7, 6, 5, 4], 1) == [[0, 1, 2, 3, 4]]
    assert shares([], 2) == [[], []]
