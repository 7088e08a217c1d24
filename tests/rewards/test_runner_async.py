"""Coroutine rewards in worker processes, and Python callables in threads."""

import asyncio
import functools
import threading
import time

import pytest

from areno.errors import RewardError
from areno.rewards import RewardRunner

ASYNC = """
    import asyncio, os, time
    async def reward_fn(record):
        what, _, seconds = record.completion.partition(" ")
        if what == "wait":
            await asyncio.sleep(float(seconds))
        elif what == "block":
            time.sleep(float(seconds))
        elif what == "die":
            await asyncio.sleep(0.05)
            os._exit(5)
        elif what == "raise":
            raise TimeoutError("my own")
        return 1
"""


def _values(outcomes):
    return [outcome.value for outcome in outcomes]


def test_many_coroutines_run_at_once(reward_file, records):
    with RewardRunner(path=reward_file(ASYNC), timeout_s=10, workers=2) as runner:
        runner.start()
        start = time.monotonic()
        assert _values(runner.run(records(*["wait 0.3"] * 64))) == [1.0] * 64
        assert time.monotonic() - start < 3


def test_coroutine_past_its_deadline_is_cancelled_and_only_its_record_fails(reward_file, records):
    with RewardRunner(path=reward_file(ASYNC), timeout_s=0.4, workers=1, on_error="drop") as runner:
        outcomes = runner.run(records("wait 0.1", "wait 60", "ok"))
    assert _values(outcomes) == [1.0, None, 1.0]
    assert "no result within 0.4 s" in outcomes[1].error


def test_the_value_of_a_coroutine_that_catches_its_cancellation_is_too_late(reward_file, records):
    path = reward_file("""
        import asyncio
        async def reward_fn(record):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass
            return 1
    """)
    with RewardRunner(path=path, timeout_s=0.4, workers=1, on_error="drop") as runner:
        [outcome] = runner.run(records("a"))
    assert outcome.value is None
    assert "no result within 0.4 s" in outcome.error


@pytest.mark.parametrize(("bad", "text"), [("block 60", "no result within 0.4 s"), ("die", "exit code 5")])
def test_only_the_record_that_blocks_or_kills_the_event_loop_fails(reward_file, records, bad, text):
    with RewardRunner(path=reward_file(ASYNC), timeout_s=0.4, workers=1, on_error="drop") as runner:
        outcomes = runner.run(records("wait 0.2", "ok", bad, "wait 0.1", "ok"))
    assert _values(outcomes) == [1.0, 1.0, None, 1.0, 1.0]
    assert text in outcomes[2].error


def test_timeout_error_raised_by_a_coroutine_is_not_mistaken_for_a_deadline(reward_file, records):
    path = reward_file(ASYNC)
    with RewardRunner(path=path, timeout_s=5, workers=1) as runner, pytest.raises(RewardError, match="Error: my own"):
        runner.run(records("raise"))


def test_client_session_bound_to_the_loop_survives_across_batches(reward_file, records):
    path = reward_file("""
        import asyncio
        loops = set()
        async def reward_fn(record):
            loops.add(asyncio.get_running_loop())
            return len(loops)
    """)
    with RewardRunner(path=path, timeout_s=5, workers=1) as runner:
        assert _values(runner.run(records("a"))) == [1.0]
        assert _values(runner.run(records("b"))) == [1.0]


def test_more_coroutines_than_slots_all_finish_within_their_own_deadlines(reward_file, records):
    with RewardRunner(path=reward_file(ASYNC), timeout_s=1.0, workers=1) as runner:
        assert _values(runner.run(records(*["wait 0.3"] * 200))) == [1.0] * 200


def test_closure_is_called_in_threads_with_the_record_itself(records):
    seen = []

    def reward(record):
        seen.append((threading.current_thread() is not threading.main_thread(), record))
        return len(record.completion)

    batch = records("a", "bb", "ccc")
    batch[0].source_record = {"anything": lambda: None}
    with RewardRunner(reward, timeout_s=5, workers=2) as runner:
        runner.start()
        assert _values(runner.run(batch)) == [1.0, 2.0, 3.0]
    assert all(outside for outside, _ in seen)
    assert sorted(map(id, (record for _, record in seen))) == sorted(map(id, batch))


def test_calls_of_an_async_closure_run_concurrently_in_one_loop(records):
    async def reward(record):
        await asyncio.sleep(0.2)
        return threading.get_ident()

    with RewardRunner(reward, timeout_s=5) as runner:
        start = time.monotonic()
        assert len(set(_values(runner.run(records(*"abcdefgh" * 4))))) == 1
        assert time.monotonic() - start < 2


def test_closure_errors_read_like_those_of_files(records):
    def reward(record):
        raise KeyError("answer")

    with RewardRunner(reward, timeout_s=5, workers=1) as runner, pytest.raises(RewardError) as caught:
        runner.run(records("x"))
    message = str(caught.value)
    assert "KeyError: 'answer'" in message
    assert "test_runner_async.py:" in message
    assert "prompt_index 0, sample_index 0" in message


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
def test_hanging_closure_is_abandoned_at_its_deadline(records, kind):
    release = threading.Event()

    def plain(record):
        if record.completion == "hang":
            release.wait(30)
        return 1

    async def coroutine(record):
        return plain(record)

    with RewardRunner(
        {"plain": plain, "coroutine": coroutine}[kind], timeout_s=0.3, workers=1, on_error="drop"
    ) as runner:
        start = time.monotonic()
        outcomes = runner.run(records("a", "hang", "b"))
        assert time.monotonic() - start < 6
        assert _values(outcomes) == [1.0, None, 1.0]
        assert "no result within 0.3 s" in outcomes[1].error
        release.set()
        assert _values(runner.run(records("a", "b"))) == [1.0, 1.0], "late results of abandoned calls are ignored"


def test_partials_and_callable_objects_work(records):
    class Judge:
        async def __call__(self, record):
            return 2

    async def scaled(factor, record):
        return factor

    for function, value in ((Judge(), 2.0), (functools.partial(scaled, 3), 3.0), (lambda record: 4, 4.0)):
        with RewardRunner(function, timeout_s=5, workers=1) as runner:
            assert _values(runner.run(records("x"))) == [value]
