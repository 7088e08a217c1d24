"""Signals end a run at a safe moment."""

from __future__ import annotations

import os
import signal

import pytest

from areno.training.stopping import StopController, StopRequested


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_work_that_can_be_repeated_and_the_second_one_everything(signum):
    stop = StopController()
    inherited = signal.signal(
        signum, signal.default_int_handler
    )  # SIGHUP may be ignored: the tests may run under nohup
    before = signal.getsignal(signum)
    with stop.signals():
        with pytest.raises(StopRequested) as caught, stop.interruptible():
            os.kill(os.getpid(), signum)
            signal.pause()
        assert caught.value.signum == signum
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signum)
            signal.pause()
    assert signal.getsignal(signum) == before
    signal.signal(signum, inherited)


def test_work_that_cannot_be_repeated_is_finished_first():
    stop = StopController()
    with stop.signals():
        with stop.interruptible():
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == signal.SIGTERM
        with pytest.raises(StopRequested), stop.interruptible():
            raise AssertionError("work begins though a stop is asked for")


def test_a_program_under_nohup_goes_on_when_its_terminal_is_closed():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopController()
        with stop.signals(), stop.interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
        stop.check()
    finally:
        signal.signal(signal.SIGHUP, before)
