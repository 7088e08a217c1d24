"""Replica processes are killed and stopped: no request is lost, and no process or memory is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from areno.engine.parallel.rendezvous import FolderRendezvous
from areno.errors import EngineError, UsageError
from areno.rollouts.fleet import weight_update
from areno.rollouts.fleet.replica_supervisor import WorkerCreationError, WorkerFailedError
from areno.rollouts.fleet.tensors import layout, rollout_specs
from areno.rollouts.fleet.weight_update import Update
from tests.experiments.fleet.support import answers, generated, learn, parameters_of, requests, same, wait_until
from tests.support.cli import environment, preloaded
from tests.support.preloaded import Forked
from tests.support.processes import alive, workers_of


def pids(fleet) -> list[int]:
    return [pid for replica in fleet.health().replicas for pid in replica.worker.pids]


def sleep_a_minute(_engine) -> None:
    time.sleep(60)


def states(fleet) -> list[str]:
    return [replica.worker.state for replica in fleet.health().replicas]


@pytest.mark.parametrize("mode", ["shm", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("xccl", "disk"))])
def test_a_killed_replica_comes_back_with_the_current_weights_and_every_request_is_answered(
    trainer, open_fleet, tmp_path, mode
):
    fleet = open_fleet(replicas=2)
    learn(trainer)
    fleet.update_weights(trainer, 5, mode)
    current = parameters_of(trainer)
    expected = answers(trainer, requests(6, tokens=300))
    trainer.wait_idle()
    learn(trainer)  # newer weights, which are not sent
    futures = fleet.submit(requests(6, tokens=300))
    wait_until(lambda: generated(fleet) > 100)
    assert [replica.unfinished for replica in fleet.health().replicas] == [3, 3]
    victim = pids(fleet)[0]
    os.kill(victim, signal.SIGKILL)

    samples = [future.result(timeout=120).sequences[0] for future in futures]
    assert [sample.resp_tokens for sample in samples] == expected
    assert all(set(sample.versions) == {5} for sample in samples)
    wait_until(lambda: states(fleet) == ["ready", "ready"])
    health = fleet.health()
    assert (health.restarts, health.resubmitted, health.version, health.waiting) == (1, 3, 5, 0)
    assert "was killed by signal 9" in health.replicas[0].worker.error
    assert victim not in pids(fleet)
    for group in fleet._up().values():
        assert same(group.run_on_all_ranks(parameters_of)[0], current)
    assert (tmp_path / "logs" / "rollout-0.log").read_text().count("==== rollout/0, start") == 2
    assert (tmp_path / "logs" / "rollout-1.log").read_text().count("==== rollout/1, start") == 1

    fleet.update_weights(trainer, 6, mode, verify=True)  # the new process takes part
    assert {v for f in fleet.submit(requests(4)) for v in f.result(60).sequences[0].versions} == {6}
    left = pids(fleet)
    fleet.close()
    wait_until(lambda: not any(map(alive, left)), 10)
    assert workers_of(os.getpid()) == []


def test_requests_wait_for_the_only_replica_and_streams_are_not_restarted(open_fleet):
    fleet = open_fleet()
    heard = []
    streamed = requests(1, tokens=2000)[0]
    streamed.listener = lambda _, token: heard.append(token)
    stream = fleet.submit([streamed])[0]
    wait_until(lambda: len(heard) > 5)
    os.kill(pids(fleet)[0], signal.SIGKILL)
    with pytest.raises(EngineError, match="died while streaming"):
        stream.result(timeout=30)
    futures = fleet.submit(requests(2, tokens=5))
    fleet.cancel(futures[1])
    assert futures[1].result(timeout=1).sequences[0].finish_reason == "abort"
    assert fleet.health().waiting == 1
    assert len(futures[0].result(timeout=60).sequences[0].resp_tokens) == 5
    running = fleet.submit(requests(1, tokens=4000))[0]
    wait_until(lambda: generated(fleet) > 50)
    fleet.cancel(running)
    partial = running.result(timeout=30).sequences[0]
    assert partial.finish_reason == "abort"
    assert 0 < len(partial.resp_tokens) < 4000


def test_a_fleet_without_restarts_left_fails_and_shows_the_log(open_fleet, tmp_path):
    fleet = open_fleet(max_restarts=1)
    future = None
    for _ in range(2):
        wait_until(lambda: states(fleet) == ["ready"])
        future = fleet.submit(requests(1, tokens=4000))[0]
        wait_until(lambda: generated(fleet) > 5)
        os.kill(pids(fleet)[0], signal.SIGKILL)
        wait_until(lambda: states(fleet) != ["ready"])
    pattern = r"(?s)rollout/0 failed, and its 1 restarts are used up: .*signal 9.*last \d+ lines of .*rollout-0\.log"
    with pytest.raises(WorkerFailedError, match=pattern) as caught:
        future.result(timeout=30)
    assert "==== rollout/0, start 2" in str(caught.value)
    with pytest.raises(WorkerFailedError, match="restarts are used up"):
        fleet.submit(requests(1))
    assert states(fleet) == ["failed"]
    assert workers_of(os.getpid()) == []


@pytest.mark.long
def test_without_restarts_the_other_replicas_continue_until_none_is_left(open_fleet):
    fleet = open_fleet(replicas=2, restart=False)
    expected = answers(fleet, requests(4, tokens=200))
    futures = fleet.submit(requests(4, tokens=200))
    os.kill(pids(fleet)[1], signal.SIGKILL)
    assert [future.result(60).sequences[0].resp_tokens for future in futures] == expected
    wait_until(lambda: states(fleet) == ["ready", "failed"])
    last = fleet.submit(requests(1, tokens=4000))[0]
    os.kill(pids(fleet)[0], signal.SIGKILL)
    with pytest.raises(WorkerFailedError, match="restarts are disabled"):
        last.result(timeout=30)


def test_a_failed_start_says_why_and_leaves_no_process(open_fleet, tmp_path):
    with pytest.raises(UsageError, match="no-such-model"):
        open_fleet(path=tmp_path / "no-such-model")
    with pytest.raises(WorkerCreationError, match=r"have not started within 0\.05 s"):
        open_fleet(startup_timeout_s=0.05)
    with pytest.raises(UsageError, match="num_attention_heads"):
        open_fleet(tp_size=3)
    assert workers_of(os.getpid()) == []


@pytest.mark.long
def test_a_stopped_replica_is_replaced_within_half_a_minute(open_fleet):
    fleet = open_fleet(replicas=2)
    expected = answers(fleet, requests(4, tokens=300))
    futures = fleet.submit(requests(4, tokens=300))
    stopped = pids(fleet)[1]
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    assert [future.result(60).sequences[0].resp_tokens for future in futures] == expected
    assert time.monotonic() - began < 30
    wait_until(lambda: states(fleet) == ["ready", "ready"])
    assert not alive(stopped)
    assert fleet.health().resubmitted == 2


@pytest.mark.long
def test_a_weight_update_completes_when_a_replica_is_killed_during_it(trainer, open_fleet):
    """The broadcast breaks; surviving and restarted replicas take the weights from shared memory."""
    fleet = open_fleet(replicas=2)
    fleet.update_weights(trainer, 1, "xccl")
    for version, delay in enumerate((0.0, 0.003, 0.01), start=2):
        wait_until(lambda: states(fleet) == ["ready", "ready"])
        learn(trainer, seed=version)
        victim = pids(fleet)[version % 2]
        killer = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep({delay}); os.kill({victim}, 9)"])
        fleet.update_weights(trainer, version, "xccl", verify=True)
        killer.wait()
        wait_until(lambda: fleet.health().restarts == version - 1 and states(fleet) == ["ready", "ready"])  # noqa: B023
        for group in fleet._up().values():
            assert same(group.run_on_all_ranks(parameters_of)[0], parameters_of(trainer))
    assert answers(fleet, requests(2)) == answers(trainer, requests(2))


def test_a_replica_killed_while_the_broadcast_group_forms_does_not_block_the_others(trainer, open_fleet):
    fleet = open_fleet(replicas=2)
    learn(trainer)
    busy, victim = fleet._up()[0], pids(fleet)[0]
    with ThreadPoolExecutor(1) as pool:
        nap = pool.submit(busy.run_on_all_ranks, sleep_a_minute)  # it dies before it joins the group
        threading.Timer(1.0, os.kill, [victim, signal.SIGKILL]).start()
        began = time.monotonic()
        fleet.update_weights(trainer, 1, "xccl", verify=True)
        assert time.monotonic() - began < 60  # a member waits for the others for two minutes
        assert isinstance(nap.exception(), EngineError)
    wait_until(lambda: states(fleet) == ["ready", "ready"])
    for group in fleet._up().values():
        assert same(group.run_on_all_ranks(parameters_of)[0], parameters_of(trainer))


def test_a_member_leaves_a_cancelled_collective_that_another_member_never_joins(trainer, tmp_path):
    """The other member has arrived, but dies before it connects. gloo alone would wait for minutes."""
    where = FolderRendezvous(tmp_path)
    where.open("weights")
    where.come("weights", 1)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(trainer.run_on_all_ranks, weight_update.join, where, "weights", 0, 2)
        time.sleep(0.5)
        where.call_off("weights")
        assert joined.result(timeout=20)[0] != ""


def test_a_broadcast_that_breaks_between_two_buckets_is_left_at_once(trainer, tmp_path):
    """One member leaves after the first bucket. The surviving member must not wait for the next bucket."""
    where = FolderRendezvous(tmp_path)
    where.open("weights")
    update = Update(version=1, specs=rollout_specs(trainer), channel="weights", bucket_bytes=1)
    buckets = list(weight_update._buckets(update.specs, update.bucket_bytes))

    def receive(rank: int, count: int) -> None:
        group = weight_update._meet(where, "weights", rank, 3, torch.device("cpu"))
        for bucket in buckets[:count]:
            group.broadcast(torch.empty(layout(bucket)[1], dtype=torch.uint8))

    for rank in (1, 2):
        where.come("weights", rank)
    with ThreadPoolExecutor(2) as pool:
        leaver, survivor = pool.submit(receive, 1, 1), pool.submit(receive, 2, len(buckets))
        assert weight_update.join(trainer, where, "weights", 0, 3) == ""
        broken = weight_update.send(trainer, update)
        assert leaver.exception(20) is None
        assert "new weights did not arrive" in broken
        with pytest.raises(RuntimeError, match=r"[Cc]onnection"):
            survivor.result(timeout=20)


def test_a_killed_parent_leaves_no_process_and_no_shared_memory(policy, tmp_path):
    before = set(Path("/dev/shm").iterdir())
    end, beginning = os.pipe()
    words = [str(policy), str(tmp_path)]
    parent = Forked(preloaded().fork("tests.experiments.fleet.parent", words, environment(), beginning, beginning))
    os.close(beginning)
    with open(end) as output:
        workers = list(map(int, output.readline().split()))
    assert len(workers) == 2
    assert all(map(alive, workers))
    parent.kill()
    wait_until(lambda: not any(map(alive, workers)), 10)
    assert {path for path in Path("/dev/shm").iterdir() if "areno" in path.name} <= before
