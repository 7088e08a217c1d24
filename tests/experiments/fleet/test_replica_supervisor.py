"""Jobs of real processes: started, listed, logged, killed, restarted, closed."""

from __future__ import annotations

import functools
import logging
import os
import signal
import time

import pytest

from areno.engine.parallel.workers import WorkerGroup
from areno.rollouts.fleet.replica_supervisor import (
    ReplicaJob,
    ReplicaSupervisor,
    WorkerCreationError,
    WorkerFailedError,
    tail,
)
from tests.experiments.fleet import objects
from tests.experiments.fleet.support import wait_until
from tests.support.processes import alive, workers_of


class Holder:
    """The minimum that a job must make: a group of one process."""

    def __init__(self, make, number, processes, on_failure) -> None:
        maker = functools.partial(make, number)
        self.workers = WorkerGroup([maker], processes=processes, on_failure=on_failure)

    def close(self) -> None:
        self.workers.close()


@pytest.fixture
def start(tmp_path):
    started = []

    def make(maker=objects.make, **more) -> ReplicaSupervisor:
        settings = {"role": "echo", "replicas": 1, "log_folder": tmp_path / "logs", "backoff_s": 0.1, **more}
        started.append(ReplicaSupervisor(ReplicaJob(make=functools.partial(Holder, maker), **settings)))
        return started[-1]

    yield make
    for supervisor in started:
        supervisor.close()
    assert workers_of(os.getpid()) == []


def test_workers_have_ids_logs_threads_and_environments(start, tmp_path, caplog):
    made = {}
    supervisor = start(replicas=2, threads=3, environment={"MARK": "x"}, on_start=made.__setitem__)
    about = made[1].workers.call("about")[0]
    assert (about["OMP_NUM_THREADS"], about["MARK"], about["LOCAL_RANK"]) == ("3", "x", "0")
    with caplog.at_level(logging.INFO, logger="areno"):
        made[1].workers.call("speak", "hello")
    assert [r.getMessage() for r in caplog.records if r.name == "areno.test"] == ["[echo 1] warned hello"]
    log = (tmp_path / "logs" / "echo-1.log").read_text()
    for line in ("==== echo/1, start 1", "printed hello", "written hello", "logged hello", "warned hello"):
        assert line in log
    assert "hello" not in (tmp_path / "logs" / "echo-0.log").read_text()

    workers = supervisor.workers()
    assert [(w.id, w.state, w.restarts, w.error) for w in workers] == [(f"echo/{n}", "ready", 0, "") for n in (0, 1)]
    pids = [pid for worker in workers for pid in worker.pids]
    assert len(set(pids)) == 2
    supervisor.close()
    assert not any(map(alive, pids))
    assert supervisor.workers() == []


def test_a_dead_worker_is_restarted_until_its_restarts_are_used_up(start):
    lost, given_up = [], []
    supervisor = start(restarts=2, on_lost=lost.append, on_given_up=lambda *event: given_up.append(event))
    for restarts in range(3):
        wait_until(lambda: supervisor.workers()[0].state == "ready")
        worker = supervisor.workers()[0]
        assert worker.restarts == restarts
        os.kill(worker.pids[0], signal.SIGKILL)
        wait_until(lambda at=restarts: len(lost) == at + 1)
    wait_until(lambda: given_up)
    assert given_up[0][0] == 0
    with pytest.raises(WorkerFailedError, match=r"(?s)echo/0 failed, and its 2 restarts .*signal 9.*start 3"):
        raise given_up[0][1]
    assert (supervisor.workers()[0].state, supervisor.workers()[0].pids) == ("failed", ())


def test_a_worker_that_cannot_start_shows_its_log(start):
    with pytest.raises(
        WorkerCreationError, match=r"(?s)echo/0 could not be started.*nothing can be made.*about to fail"
    ):
        start(objects.refuse)
    began = time.monotonic()
    with pytest.raises(WorkerCreationError, match=r"have not started within 2\.0 s"):
        start(objects.dawdle, startup_timeout_s=2.0)
    assert time.monotonic() - began < 30
    assert workers_of(os.getpid()) == []


def test_a_log_file_that_cannot_be_written_is_an_error_at_the_start_and_after_a_restart(start, tmp_path):
    (tmp_path / "logs" / "echo-1.log").mkdir(parents=True)
    with pytest.raises(WorkerCreationError, match=r"echo/1 could not be started: IsADirectoryError.*echo-1\.log"):
        start(replicas=2)
    given_up = []
    supervisor = start(restarts=2, on_given_up=lambda _, error: given_up.append(error))
    log = tmp_path / "logs" / "echo-0.log"
    log.unlink()
    log.mkdir()
    os.kill(supervisor.workers()[0].pids[0], signal.SIGKILL)
    wait_until(lambda: given_up)
    assert "its 2 restarts are used up: IsADirectoryError" in str(given_up[0])
    assert supervisor.workers()[0].state == "failed"


def test_closing_does_not_wait_for_a_restart(start):
    supervisor = start(backoff_s=30.0)
    os.kill(supervisor.workers()[0].pids[0], signal.SIGKILL)
    wait_until(lambda: supervisor.workers()[0].state == "restarting")
    began = time.monotonic()
    supervisor.close()
    assert time.monotonic() - began < 10


def test_the_tail_is_fifty_lines(tmp_path):
    file = tmp_path / "x.log"
    file.write_bytes(b"".join(b"line %d\n" % i for i in range(80)) + b"not utf-8 \xff")
    lines = tail(file).splitlines()
    assert lines[0] == f"The last 50 lines of {file}:"
    assert (lines[1], lines[-2]) == ("line 31", "line 79")
    assert len(lines) == 51
