"""Signals end a run at a safe moment."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from areno.training.stopping import StopController, StopRequested
from tests.support.loops import open_loop


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


def test_answers_that_a_stop_cuts_off_are_generated_again(tiny_checkpoint, tmp_path):
    """One prompt is answered at a time, and the stop comes after the first answers."""
    options = {"max_running_prompts": 3, "max_new_tokens": 100, "ignore_eos": True}

    def interrupt(source):
        while not any(future.done() for future in source._ahead._begun.get(0, [])):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    with open_loop("grpo", tiny_checkpoint, tmp_path / "stopped", **options) as loop:
        batch, _ = next(loop.batches(range(4), 0))
        thread = threading.Thread(target=interrupt, args=[loop._source])
        thread.start()
        with loop.stop.signals(), pytest.raises(StopRequested):
            loop.run_step(batch)
        thread.join()
        begun = [future.result() for future in loop._source._ahead.take(0)]
        state = loop.rollout_state()
    whole = [i for i, result in enumerate(begun) if all(len(s.resp_tokens) == 100 for s in result.sequences)]
    assert 0 < len(whole) < len(begun)
    assert list(state[0]) == whole
    rows = []
    for name, unused in (("resumed", state), ("uninterrupted", None)):
        with open_loop("grpo", tiny_checkpoint, tmp_path / name, **options) as loop:
            loop._source.load_state(unused)
            rows.append([row.tokens for row in loop.run_step(batch).rows])
    assert rows[0] == rows[1]
