"""Admission by the documented formula, checked against independent counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import areno  # noqa: F401
from areno.errors import UsageError
from areno.rollouts.staleness import StalenessManager, oldest_version, too_old
from tests.support.examples import examples


class Admission(RuleBasedStateMachine):
    """A trainer and its episodes: the formula holds for any order of events."""

    @initialize(
        batch=st.integers(1, 5),
        eta=st.integers(0, 4),
        most=st.one_of(st.none(), st.integers(-1, 12)),
        replaces=st.booleans(),
    )
    def begin(self, batch: int, eta: int, most: int | None, replaces: bool) -> None:
        self.batch, self.eta, self.replaces = batch, eta, replaces
        self.most = batch if most is None else max(1, most)
        self.manager = StalenessManager(
            max_concurrent_rollouts=most,
            consumer_batch_size=batch,
            max_head_offpolicyness=eta,
            replaces_rejected=replaces,
        )
        self.version = 0
        self.waiting = self.running = self.ready = self.rejected_ready = self.used = 0
        self.begun_in_version = 0

    @rule(rows=st.integers(1, 4))
    def rows_come(self, rows: int) -> None:
        self.manager.enqueue(rows)
        self.waiting += rows

    @rule()
    def pump(self) -> None:
        while self.waiting and self.manager.capacity(self.version) > 0:
            self.manager.begin()
            self.waiting -= 1
            self.running += 1
            self.begun_in_version += 1

    @precondition(lambda self: self.running)
    @rule()
    def accept(self) -> None:
        self.manager.accept()
        self.running -= 1
        self.ready += 1

    @precondition(lambda self: self.running)
    @rule()
    def reject(self) -> None:
        self.manager.reject()
        self.running -= 1
        self.rejected_ready += 0 if self.replaces else 1

    @precondition(lambda self: self.ready)
    @rule()
    def drop_stale(self) -> None:
        self.manager.discard()
        self.ready -= 1

    @precondition(lambda self: self.ready + self.rejected_ready >= self.batch)
    @rule()
    def train(self) -> None:
        rejected = min(self.rejected_ready, self.batch)
        self.rejected_ready -= rejected
        self.ready -= self.batch - rejected
        self.used += self.batch
        self.version += 1
        self.begun_in_version = 0

    @rule()
    def crash_and_recover(self) -> None:
        self.manager.recover(self.version, self.ready, self.rejected_ready)
        self.manager.enqueue(self.waiting + self.running)
        self.waiting, self.running = self.waiting + self.running, 0

    @invariant()
    def never_more_than_may_run_at_once(self) -> None:
        assert self.running <= self.most

    @invariant()
    def never_more_than_the_versions_allow(self) -> None:
        promised = self.used + self.ready + self.rejected_ready + self.running
        assert promised <= (self.eta + self.version + 1) * self.batch

    @invariant()
    def episodes_in_flight_fit_the_coming_batches(self) -> None:
        # In other words: with one batch per version, all of it is used within eta versions from now.
        assert self.ready + self.rejected_ready + self.running <= (self.eta + 1) * self.batch

    @invariant()
    def capacity_is_the_formula(self) -> None:
        promised = self.used + self.ready + self.rejected_ready + self.running
        wanted = min(self.most - self.running, (self.eta + self.version + 1) * self.batch - promised)
        assert self.manager.capacity(self.version) == wanted

    @invariant()
    def synchronous_training_has_one_batch_in_flight(self) -> None:
        if self.eta == 0:
            assert self.running + self.ready + self.rejected_ready <= self.batch


TestAdmission = Admission.TestCase
TestAdmission.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


def test_capacity_by_hand():
    manager = StalenessManager(max_concurrent_rollouts=100, consumer_batch_size=4, max_head_offpolicyness=2)
    assert manager.capacity(0) == 12
    assert manager.pending_limit == 12
    manager.enqueue(5)
    for _ in range(5):
        manager.begin()
    manager.accept()
    manager.reject()
    assert (manager.stat.running, manager.stat.accepted, manager.stat.rejected) == (3, 1, 1)
    assert manager.capacity(0) == 12 - 4
    assert manager.capacity(1) == 16 - 4


def test_capacity_may_be_negative():
    manager = StalenessManager(max_concurrent_rollouts=8, consumer_batch_size=2, max_head_offpolicyness=1)
    manager.recover(version=3, unused=4)
    assert manager.capacity(2) == (1 + 2 + 1) * 2 - (3 * 2 + 4)


def test_concurrency_is_the_batch_size_unless_given():
    assert StalenessManager(consumer_batch_size=6, max_head_offpolicyness=9).capacity(0) == 6
    assert StalenessManager(max_concurrent_rollouts=0, consumer_batch_size=6).capacity(0) == 1


def test_recovery_keeps_the_bound_of_an_uninterrupted_run():
    """Without counting what earlier versions have used, a run that resumes at version 10 could run 11 batches ahead."""
    manager = StalenessManager(max_concurrent_rollouts=1000, consumer_batch_size=4, max_head_offpolicyness=1)
    manager.recover(version=10)
    assert manager.capacity(10) == 8
    manager.recover(version=10, unused=3)
    assert manager.capacity(10) == 5


def test_negative_staleness_is_refused():
    with pytest.raises(UsageError, match=r"max_head_offpolicyness must be at least 0 .*got -1"):
        StalenessManager(max_head_offpolicyness=-1)


def test_only_the_oldest_sampled_token_decides_whether_a_trajectory_is_too_old():
    trajectory = {"versions": torch.tensor([[-1, 7, 5], [-1, 4, -1]])}
    assert oldest_version(trajectory) == 4
    assert [too_old(trajectory, version, bound=2) for version in (5, 6, 7)] == [False, False, True]
    assert not too_old({"versions": torch.tensor([[-1, -1]])}, 9, bound=0)
