"""Jobs of real processes: started, listed, logged, killed, started again, ended."""

from __future__ import annotations

import functools
import logging
import os
import signal
import time

import pytest

from areno.engine.parallel.workers import WorkerGroup
from areno.errors import UsageError
from areno.rollouts.scheduler.errors import (
    WorkerCreationError,
    WorkerFailedError,
    WorkerNotFoundError,
    WorkerTimeoutError,
)
from areno.rollouts.scheduler.local import Job, LocalScheduler, tail
from tests.experiments.fleet.support import wait_until
from tests.experiments.scheduler import objects
from tests.support.processes import alive, workers_of


class Holder:
    """The least that a job may make: a group of one process."""

    def __init__(self, make, number, processes, on_failure) -> None:
        maker = functools.partial(make, number)
        self.workers = WorkerGroup([maker], processes=processes, on_failure=on_failure)

    def close(self) -> None:
        self.workers.close()


@pytest.fixture
def scheduler(tmp_path):
    made = LocalScheduler(tmp_path / "logs", startup_timeout_s=60)
    yield made
    made.delete_workers()
    assert workers_of(os.getpid()) == []


def job(role="echo", make=objects.make, **more) -> Job:
    return Job(**{"role": role, "replicas": 1, "make": functools.partial(Holder, make), "backoff_s": 0.1, **more})


def test_workers_have_ids_logs_threads_and_environments(scheduler, tmp_path, caplog):
    made = {}
    ready = []
    ids = scheduler.create_workers(
        job(replicas=2, threads=3, environment={"MARK": "x"}, on_start=made.__setitem__, on_ready=ready.append)
    )
    assert ids == ["echo/0", "echo/1"]
    assert sorted(ready) == [0, 1]
    about = made[1].workers.call("about")[0]
    assert (about["OMP_NUM_THREADS"], about["MARK"], about["LOCAL_RANK"]) == ("3", "x", "0")
    with caplog.at_level(logging.INFO, logger="areno"):
        made[1].workers.call("speak", "hello")
    assert [r.getMessage() for r in caplog.records if r.name == "areno.test"] == ["[echo 1] warned hello"]
    log = (tmp_path / "logs" / "echo-1.log").read_text()
    for line in ("==== echo/1, start 1", "printed hello", "written hello", "logged hello", "warned hello"):
        assert line in log
    assert "hello" not in (tmp_path / "logs" / "echo-0.log").read_text()

    workers = scheduler.get_workers("echo", timeout=5)
    assert [(w.id, w.state, w.restarts, w.error) for w in workers] == [(i, "ready", 0, "") for i in ids]
    pids = [pid for worker in workers for pid in worker.pids]
    assert len(set(pids)) == 2
    with pytest.raises(UsageError, match="workers of the role 'echo' already"):
        scheduler.create_workers(job())
    with pytest.raises(WorkerNotFoundError, match="role 'other'; roles: echo"):
        scheduler.get_workers("other")
    scheduler.delete_workers("echo", reverse_order=True)
    assert not any(map(alive, pids))
    with pytest.raises(WorkerNotFoundError):
        scheduler.delete_workers("echo")


def test_a_dead_worker_is_started_again_until_its_restarts_are_used_up(scheduler):
    lost, given_up = [], []
    scheduler.create_workers(
        job(restarts=2, on_lost=lost.append, on_given_up=lambda number, error: given_up.append((number, error)))
    )
    for restarts in range(3):
        worker = scheduler.get_workers("echo", timeout=60)[0]
        assert worker.restarts == restarts
        os.kill(worker.pids[0], signal.SIGKILL)
        wait_until(lambda at=restarts: len(lost) == at + 1)
    with pytest.raises(WorkerFailedError, match=r"(?s)echo/0 has failed, and its 2 restarts .*signal 9.*start 3"):
        scheduler.get_workers("echo", timeout=60)
    wait_until(lambda: given_up)
    assert given_up[0][0] == 0
    assert isinstance(given_up[0][1], WorkerFailedError)
    assert scheduler.get_workers("echo")[0].pids == ()


def test_a_worker_that_cannot_start_shows_its_log(scheduler):
    with pytest.raises(
        WorkerCreationError, match=r"(?s)echo/0 could not be started.*nothing can be made.*about to fail"
    ):
        scheduler.create_workers(job(make=objects.refuse))
    impatient = LocalScheduler(scheduler.log_folder, startup_timeout_s=2.0)
    began = time.monotonic()
    with pytest.raises(WorkerCreationError, match=r"have not started within 2\.0 s"):
        impatient.create_workers(job(make=objects.dawdle))
    assert time.monotonic() - began < 30
    assert workers_of(os.getpid()) == []


def test_waiting_for_workers_has_an_end(scheduler):
    scheduler.create_workers(job(backoff_s=30.0))
    os.kill(scheduler.get_workers("echo")[0].pids[0], signal.SIGKILL)
    wait_until(lambda: scheduler.get_workers("echo")[0].state == "restarting")
    with pytest.raises(WorkerTimeoutError, match=r"echo/0 is restarting after 0\.1 s"):
        scheduler.get_workers("echo", timeout=0.1)
    began = time.monotonic()
    scheduler.delete_workers("echo")  # does not wait for the restart
    assert time.monotonic() - began < 10


def test_the_tail_is_fifty_lines(tmp_path):
    file = tmp_path / "x.log"
    file.write_bytes(b"".join(b"line %d\n" % i for i in range(80)) + b"not utf-8 \xff")
    lines = tail(file).splitlines()
    assert lines[0] == f"The last 50 lines of {file}:"
    assert (lines[1], lines[-2]) == ("line 31", "line 79")
    assert len(lines) == 51
