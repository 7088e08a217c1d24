"""Signals end a run at a safe moment."""

from __future__ import annotations

import os
import signal

import pytest

from areno.training.stopping import StopController, StopRequested


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_repeatable_work_and_a_second_one_everything(signum):
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


def test_unrepeatable_work_is_finished_first():
    stop = StopController()
    with stop.signals():
        with stop.interruptible():
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == signal.SIGTERM
        with pytest.raises(StopRequested), stop.interruptible():
            raise AssertionError("work starts although a stop was requested")


def test_a_program_under_nohup_keeps_running_when_its_terminal_closes():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopController()
        with stop.signals(), stop.interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
        stop.check()
    finally:
        signal.signal(signal.SIGHUP, before)
