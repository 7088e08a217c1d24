"""Ranks and replicas that connect over TCP and share no memory, as on separate machines, give the results of one machine.

A launcher of the tests starts them; Ray and Slurm start the same processes.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from areno.engine.parallel.group import EngineGroup
from areno.engine.parallel.layout import Layout
from areno.engine.parallel.workers import Processes, WorkerGroup
from areno.errors import EngineError
from areno.launch.launcher import RoleNeed
from areno.launch.links import KEY, LINK
from areno.rollouts.fleet.weight_transfer import WeightOptions
from tests.engine.parallel.objects import make_first, make_second
from tests.experiments.fleet.conftest import config, open_fleet, policy  # noqa: F401 - fixtures
from tests.experiments.fleet.support import answers, learn, parameters_of, requests, same, wait_until
from tests.launch.loopback import LoopbackLauncher


@pytest.fixture
def launcher(tmp_path):
    needs = {"actor": RoleNeed(workers=2), "rollout": RoleNeed(workers=2), "": RoleNeed()}
    made = LoopbackLauncher(tmp_path, needs)
    yield made
    made.close()


def processes(launcher, role="actor", **more):
    return Processes(launcher=launcher, role=role, threads=1, startup_s=120, **more)


def variables(_rank, _value):
    return dict(os.environ)


def shares_memory(engine):
    return engine.config.peers.data.shared_memory(8, torch.float32) is not None


def test_a_group_of_workers_connects_over_tcp(launcher, tmp_path):
    group = WorkerGroup([make_first, make_second], processes=processes(launcher, log_file=tmp_path / "log"))
    assert group.call("add", 5) == [5, 5]
    environment = group.call("apply", variables, None)
    assert all(LINK not in found and KEY not in found for found in environment)
    assert {found["ARENO_NODE"] for found in environment} == {"node-0", "node-1"}
    os.kill(group.pids[1], signal.SIGKILL)
    with pytest.raises(EngineError, match=r"rank 1 of 2 \(process \d+ on node-1\) was killed by signal 9"):
        group.call("add", 1)
    group.close()


def test_a_worker_that_cannot_start_is_reported_at_once(launcher, tmp_path):
    launcher.needs["actor"] = RoleNeed(workers=2, additional_bash_cmds=["echo no such module >&2", "exit 3"])
    began = time.monotonic()
    with pytest.raises(EngineError, match="actor/0 on node-0 exited with code 3 before connecting"):
        WorkerGroup([make_first], processes=processes(launcher, log_file=tmp_path / "log"))
    assert time.monotonic() - began < 20
    assert "no such module" in (tmp_path / "log").read_text()


def test_bash_commands_run_before_a_worker_and_its_own_command_starts_it(launcher):
    need = RoleNeed(
        additional_bash_cmds=['export FIRST="a b"'], cmd=f"env SECOND=2 {sys.executable}", env_vars={"THIRD": "3"}
    )
    launcher.needs["actor"] = need
    group = WorkerGroup([make_first], processes=processes(launcher))
    [found] = group.call("apply", variables, None)
    assert (found["FIRST"], found["SECOND"], found["THIRD"]) == ("a b", "2", "3")
    group.close()


FAR_LAYOUTS = [
    pytest.param(Layout(2, 1), id="dp2"),
    pytest.param(Layout(1, 2), id="tp2", marks=pytest.mark.long),
    pytest.param(Layout(2, 1, fsdp=True), id="fsdp2", marks=pytest.mark.long),
]


@pytest.mark.parametrize("layout", FAR_LAYOUTS)
def test_training_on_two_nodes_gives_the_weights_of_one(policy, launcher, layout, tmp_path):  # noqa: F811
    near = EngineGroup(str(policy), config(), layout, processes=Processes(threads=1))
    far = EngineGroup(str(policy), config(), layout, processes=processes(launcher))
    assert far.run_on_all_ranks(shares_memory) == [False] * 2
    if layout.dp_size > 1:
        assert near.run_on_all_ranks(shares_memory) == [True] * 2
    for step in range(3):
        one, other = learn(near, step), learn(far, step)
        assert one["loss"] == other["loss"]
    for folder, group in (("near", near), ("far", far)):
        group.save_model(tmp_path / folder)
        group.save_state(tmp_path / folder)
        group.close()
    assert same(load_file(tmp_path / "near" / "model.safetensors"), load_file(tmp_path / "far" / "model.safetensors"))


@pytest.mark.long
def test_weights_reach_replicas_on_other_nodes_bit_for_bit_also_after_a_restart(
    policy,  # noqa: F811
    open_fleet,  # noqa: F811
    launcher,
):
    trainer = EngineGroup(str(policy), config(), Layout(2, 1), processes=processes(launcher))
    weights = WeightOptions(mode="xccl", weight_chunked_mem_mb=1)
    fleet = open_fleet(replicas=2, weights=weights, launcher=launcher)
    for version in (1, 2):
        learn(trainer, seed=version)
        report = fleet.update_weights(trainer, version, verify=True)
        assert set(report.pauses_s) == {0, 1}
    expected = trainer.run_on_all_ranks(parameters_of)[0]
    for group in fleet._up().values():
        assert same(group.run_on_all_ranks(parameters_of)[0], expected)
    before = answers(fleet, requests(4))
    learn(trainer, seed=3)  # a new replica must not get weights that were not sent
    os.kill(fleet.health().replicas[1].worker.pids[0], signal.SIGKILL)
    wait_until(lambda: fleet.health().restarts == 1 and all(r.worker.state == "ready" for r in fleet.health().replicas))
    assert same(fleet._up()[1].run_on_all_ranks(parameters_of)[0], expected)
    assert answers(fleet, requests(4)) == before
    learn(trainer, seed=4)
    fleet.update_weights(trainer, 3, verify=True)
    for group in fleet._up().values():
        assert same(group.run_on_all_ranks(parameters_of)[0], trainer.run_on_all_ranks(parameters_of)[0])
    trainer.close()
