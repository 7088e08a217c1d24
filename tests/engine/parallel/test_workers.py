"""Worker processes that are really killed, stopped, stuck and orphaned."""

from __future__ import annotations

import importlib
import os
import pickle
import re
import signal
import subprocess
import sys
import time

import cloudpickle
import pytest

from areno.config.hooks import import_user_file
from areno.engine.parallel import workers
from areno.engine.parallel.messages import CallResult
from areno.engine.parallel.workers import WorkerGroup
from areno.errors import EngineError
from tests.engine.parallel import broken, objects
from tests.support.processes import alive, workers_of

MAKERS = (objects.make_first, objects.make_second)


def gone_within(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(map(alive, pids)):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def group():
    events = []
    made = WorkerGroup(MAKERS, on_event=lambda rank, payload: events.append((rank, payload)), stall_s=3600)
    made.events = events
    yield made
    made.close()
    assert gone_within(made.pids, 5)


def test_calls_closures_and_events(group, tmp_path):
    assert group.call("add", 2) == [2, 2]
    assert group.call("add", 3, ranks=[1]) == [5]
    assert len({*group.call("pid"), os.getpid()}) == 3
    base = 100
    assert group.call("apply", lambda rank, value: base + 10 * rank + value, 7) == [107, 117]
    group.call("say", "hello")
    assert sorted(group.events) == [(0, (0, "hello")), (1, (1, "hello"))]

    # A quick call overtakes a slow one.
    slow = group._ask("sleep", (1.5,), [0])[0]
    began = time.monotonic()
    assert group.tell(0, "pid").result() == group.pids[0]
    assert not slow.done()
    assert time.monotonic() - began < 1.0
    slow.result()

    # An error that all ranks raise alike is the caller's mistake; the group keeps running.
    with pytest.raises(ValueError, match="all ranks were told") as caught:
        group.call("fail_all")
    assert "fail_all" in "".join(caught.value.__notes__)
    assert group.call("add", 0) == [2, 5]

    assert group.call("apply", max, 1) == [1, 1]

    # A user's module, which only this process can import, is pickled by value.
    (tmp_path / "own.py").write_text("FACTOR = 3\n\ndef times(rank, value):\n    return FACTOR * value + rank\n")
    times = import_user_file(tmp_path / "own.py", option="--own").times
    assert group.call("apply", times, 5) == [15, 16]


def test_one_rank_that_fails_alone_ends_the_group(group, monkeypatch):
    monkeypatch.setattr(workers, "_SETTLE_S", 0.5)  # how long the other may take to fail as well
    with pytest.raises(
        EngineError, match=r"rank 1 of 2 failed during fail_on: ValueError: this rank was told"
    ) as caught:
        group.call("fail_on", 1, 60.0)
    assert "objects.py" in str(caught.value)  # where it was raised
    assert gone_within(group.pids, 5)
    with pytest.raises(EngineError, match="rank 1 of 2 failed"):
        group.call("add", 1)


def test_an_error_in_a_call_of_some_ranks_names_the_rank(group, monkeypatch):
    monkeypatch.setattr(workers, "_SETTLE_S", 0.5)
    with pytest.raises(EngineError, match=r"rank 1 of 2 failed during fail_on: ValueError: this rank was told"):
        group.call("fail_on", 1, 60.0, ranks=[1, 0])


def test_a_killed_rank_is_named_with_its_signal_and_call(group):
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"rank 0 of 2 \(process \d+\) was killed by signal 9 during die_on"):
        group.call("die_on", 0)
    assert time.monotonic() - began < 10
    assert gone_within(group.pids, 5)


def test_a_killed_rank_is_noticed_although_its_child_holds_the_connection(group, monkeypatch):
    monkeypatch.setattr(workers, "_SETTLE_S", 0.5)
    call = group.tell(1, "die_with_a_child")
    with pytest.raises(EngineError, match=r"rank 1 of 2 .* was killed by signal 9 during die_with_a_child"):
        call.result(timeout=30)
    [(_, child)] = group.events
    assert alive(child)
    os.kill(child, signal.SIGKILL)


def test_ranks_that_cannot_start_say_why_and_leave_nothing():
    with pytest.raises(EngineError, match="nothing can be made here"):
        WorkerGroup((objects.make_first, objects.refuse))
    assert workers_of(os.getpid()) == []


def test_a_failed_start_reports_no_killed_ranks():
    reported = []
    with pytest.raises(RuntimeError, match="nothing can be made here"):
        WorkerGroup([objects.refuse] * 3, on_failure=reported.append)
    assert reported == []


def test_errors_and_results_that_cannot_be_sent_are_described_and_end_nothing(group):
    class Pair(Exception):  # noqa: N818
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")  # pickle would call Pair with this one argument

    class Unpicklable:
        def __reduce__(self):
            raise pickle.PicklingError("never picklable")

    def fail(rank, _):
        raise Pair("left", "right")

    with pytest.raises(RuntimeError, match=r"Pair: left and right") as caught:
        group.call("apply", fail, 0)
    assert "in fail" in "".join(caught.value.__notes__)
    with pytest.raises(RuntimeError, match="never picklable"):
        group.call("apply", lambda _rank, _value: Unpicklable(), 0)
    assert group.call("add", 1) == [1, 1]


def test_arguments_that_a_worker_cannot_load_fail_only_their_call(group, tmp_path, monkeypatch):
    (tmp_path / "known_here_only.py").write_text("def times(rank, value):\n    return rank * value\n")
    monkeypatch.syspath_prepend(tmp_path)
    times = importlib.import_module("known_here_only").times
    message = r"cannot load the arguments of apply: ModuleNotFoundError: No module named 'known_here_only'.*search path"
    with pytest.raises(EngineError, match=message):
        group.call("apply", times, 5)
    with pytest.raises(EngineError, match=message):
        group.tell(1, "apply", times, 5).result(timeout=30)
    assert group.call("add", 1) == [1, 1]


def test_a_call_that_outlasts_the_group_says_so(group, monkeypatch):
    monkeypatch.setattr(workers, "_END_S", 0.5)
    answers = group.begin("sleep", 60.0)
    group.close()
    with pytest.raises(EngineError, match="call of sleep failed because the worker processes have been stopped"):
        answers()


def test_a_closed_group_says_so_instead_of_waiting(group):
    group.close()
    with pytest.raises(EngineError, match="call of add failed because the worker processes have been stopped"):
        group.call("add", 1)
    with pytest.raises(EngineError, match="have been stopped"):
        group.tell(0, "pid")


@pytest.mark.parametrize(
    ("method", "text", "reason"),
    [
        ("garble", b"garbage", "sent data that is not a message"),
        ("send_text", cloudpickle.dumps(CallResult(99)), "received a result of call 99, but this call is not pending"),
    ],
    ids=["garbage", "forged"],
)
def test_a_rank_that_violates_the_protocol_ends_the_group_and_is_named(method, text, reason):
    group = WorkerGroup((broken.make_broken,))
    with pytest.raises(EngineError, match=rf"rank 0 of 1 \(process \d+\) .*{reason}"):
        group.call(method, text)
    assert gone_within(group.pids, 5)
    group.close()


def test_a_rank_that_stops_in_mid_answer_is_named(monkeypatch):
    monkeypatch.setattr(workers, "STOPPED_S", 2.0)
    group = WorkerGroup((broken.make_broken,))
    with pytest.raises(
        EngineError, match=r"rank 0 of 1 .* no heartbeat .* suspended by a signal.* operation is stop_in_mid_answer"
    ):
        group.call("stop_in_mid_answer")
    assert gone_within(group.pids, 5)
    group.close()


def test_calls_do_not_wait_forever_if_the_watching_thread_fails(monkeypatch):
    group = WorkerGroup((MAKERS[0],))

    def fail(_group: WorkerGroup) -> None:
        raise ZeroDivisionError("in the check")

    monkeypatch.setattr(WorkerGroup, "_check", fail)
    with pytest.raises(EngineError, match="can no longer be watched: ZeroDivisionError: in the check"):
        group.call("sleep", 60.0)
    assert gone_within(group.pids, 5)
    group.close()


@pytest.mark.long
def test_a_loader_that_hangs_on_one_rank_ends_the_group():
    with pytest.raises(
        EngineError, match=r"rank 1 of 2 .* made no progress for .* during start; .* raise --stall-timeout"
    ):
        WorkerGroup((broken.make_broken, broken.load_forever), stall_s=10.0)  # starting takes a few seconds
    processes = workers.Processes(stall_option="actor.request_timeout", threads=1)
    with pytest.raises(EngineError, match=r"during start; .* raise actor\.request_timeout"):
        WorkerGroup((broken.load_forever,), stall_s=3.0, processes=processes)
    assert workers_of(os.getpid()) == []


@pytest.mark.long
def test_a_stopped_rank_ends_the_group_within_30_seconds(group):
    os.kill(group.pids[1], signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"rank 1 of 2 .* no heartbeat .* suspended by a signal"):
        group.call("sleep", 60.0)
    assert time.monotonic() - began < 30
    assert gone_within(group.pids, 5)


@pytest.mark.long
def test_a_rank_without_progress_ends_the_group_and_shows_where_it_was(tmp_path):
    log = tmp_path / "ranks.log"
    processes = workers.Processes(log_file=log)
    group = WorkerGroup(MAKERS, stall_s=10.0, processes=processes)  # starting on a busy machine takes a few seconds
    with pytest.raises(
        EngineError, match=r"rank 1 of 2 .* made no progress for .* during sleep; .* raise --stall-timeout.*ranks\.log"
    ):
        group.call("sleep", 60.0, ranks=[1])  # if both slept, either could be reported first
    assert gone_within(group.pids, 5)
    assert re.search(r'objects\.py", line \d+ in sleep', log.read_text())


@pytest.mark.long
@pytest.mark.parametrize("busy", [False, True])
def test_workers_end_with_the_process_that_started_them(busy):
    program = (
        "from areno.engine.parallel.workers import WorkerGroup\n"
        "from tests.engine.parallel import objects\n"
        "group = WorkerGroup((objects.make_first, objects.make_second))\n"
        "print(*group.pids, flush=True)\n"
        f"group.call('sleep', {60.0 if busy else 0.0})\n"
        "import time; time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        pids = list(map(int, parent.stdout.readline().split()))
        assert all(map(alive, pids))
        parent.kill()
    assert gone_within(pids, 10)


def test_info_lines_of_all_ranks_are_logged_with_their_rank(group, caplog):
    def speak(rank, _):
        import logging

        logging.getLogger("areno.engine.inference").info("rollout decode progress: dp=%d/2", rank)
        logging.getLogger("areno.engine.other").info("loaded")

    with caplog.at_level("INFO", logger="areno"):
        group.call("apply", speak, 0)
        group.call("pid")  # lines arrive in order, so the earlier ones are here now
    lines = sorted((record.name.rpartition(".")[2], record.message) for record in caplog.records)
    assert lines == [
        ("inference", "rollout decode progress: dp=0/2"),
        ("inference", "rollout decode progress: dp=1/2"),
        ("other", "[rank 1] loaded"),
        ("other", "loaded"),
    ]
