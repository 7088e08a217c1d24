"""Frequencies: three independent counters, checked against counting by hand."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areno.errors import UsageError
from areno.spec import Frequency
from areno.training.frequency import FrequencyControl, StepInfo


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def steps(per_epoch, total):
    at = StepInfo(0, 0, 0, per_epoch, total)
    while True:
        yield at
        if at.is_last:
            return
        at = at.next()


def due_steps(control, per_epoch, total, clock=None, seconds=1.0):
    due = []
    for at in steps(per_epoch, total):
        if clock:
            clock.now += seconds
        if control.check(at):
            due.append(at.global_step + 1)
    return due


def test_steps_are_numbered_from_0_and_know_the_ends():
    walked = [(at.epoch, at.epoch_step, at.global_step, at.ends_epoch, at.is_last) for at in steps(2, 3)]
    assert walked == [(0, 0, 0, False, False), (0, 1, 1, True, False), (1, 0, 2, False, True)]
    assert StepInfo(**json.loads(json.dumps(asdict(StepInfo(1, 0, 2, 2, 3))))) == StepInfo(1, 0, 2, 2, 3)


@given(
    per_epoch=st.integers(1, 7),
    total=st.integers(1, 30),
    epochs=st.none() | st.integers(1, 3),
    every=st.none() | st.integers(1, 9),
    last=st.booleans(),
)
def test_epochs_and_steps_count_independently(per_epoch, total, epochs, every, last):
    control = FrequencyControl(Frequency(epochs, every, last=last))
    expected = {n for n in range(1, total + 1) if every and n % every == 0}
    expected |= {n for n in range(1, total + 1) if epochs and n % (per_epoch * epochs) == 0}
    expected |= {total} if last else set()
    assert due_steps(control, per_epoch, total) == sorted(expected)


def test_seconds_are_counted_from_the_last_time_they_were_due():
    clock = Clock()
    control = FrequencyControl(Frequency(seconds=25), clock)
    assert due_steps(control, 100, 10, clock, seconds=10) == [3, 6, 9]


def test_steps_that_are_due_do_not_reset_the_seconds():
    clock = Clock()
    control = FrequencyControl(Frequency(steps=2, seconds=50), clock)
    assert due_steps(control, 100, 11, clock, seconds=10) == [2, 4, 5, 6, 8, 10]


def test_counters_survive_a_recovery_and_downtime_does_not_count():
    clock = Clock()
    first = FrequencyControl(Frequency(steps=3, seconds=100), clock)
    clock.now = 60.0
    assert not first.check(StepInfo(0, 0, 0, 10, 10))
    state = json.loads(json.dumps(first.state_dict()))
    clock.now = 10_000.0
    second = FrequencyControl(Frequency(steps=3, seconds=100), clock)
    second.load_state_dict(state)
    at = StepInfo(0, 0, 0, 10, 10).next()
    clock.now += 39
    assert not second.check(at)
    clock.now += 1
    assert second.check(at.next())  # 100 s in total, and the third step
    assert not second.check(at.next().next())


def test_before_training_is_due_once_before_the_first_step():
    control = FrequencyControl(Frequency(steps=2, first=True))
    assert control.due_before_training()
    assert not control.due_before_training()
    assert due_steps(control, 10, 5) == [2, 4]  # not shifted


def test_a_recovered_run_does_not_evaluate_before_training_again():
    first = FrequencyControl(Frequency(first=True))
    first.check(StepInfo(0, 0, 0, 2, 2))
    second = FrequencyControl(Frequency(first=True))
    second.load_state_dict(first.state_dict())
    assert not second.due_before_training()


def test_without_a_frequency_only_the_end_is_due_and_only_on_request():
    assert not Frequency().given
    assert due_steps(FrequencyControl(Frequency()), 2, 6) == []
    assert due_steps(FrequencyControl(Frequency(last=True)), 2, 6) == [6]


@pytest.mark.parametrize(
    ("name", "frequency"),
    [("freq_steps", Frequency(steps=0)), ("freq_epochs", Frequency(epochs=-1)), ("freq_secs", Frequency(seconds=0))],
)
def test_a_frequency_below_1_is_refused_by_name(name, frequency):
    with pytest.raises(UsageError, match=rf"{name}=.*null"):
        FrequencyControl(frequency)
