"""The GPUs and placement groups of workers on a Ray node with four GPUs, which only Ray's accounts have."""

from __future__ import annotations

import contextlib
import uuid

import pytest

from areno.errors import EngineError
from areno.launch import ray_cluster
from areno.launch.launcher import Names, RoleNeed, Task
from areno.launch.ray_cluster import RayLauncher
from areno.name_resolve import NameOptions
from tests.launch.services import own_folder

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("ray")]

PROGRAM = (
    "import os, time\nprint(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\ntime.sleep(float(os.environ['STAY_S']))\n"
)


@pytest.fixture
def launcher_of(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # a token would be written to the user's home
    names = Names(NameOptions("nfs", str(tmp_path / "names")), f"test/{uuid.uuid4().hex}")
    with own_folder("ray-gpus") as folder, contextlib.ExitStack() as stack:
        size = {"num_cpus": 8, "num_gpus": 4, "object_store_memory": 100_000_000, "include_dashboard": False}
        ray.init("local", **size, log_to_driver=False, _temp_dir=str(folder))
        stack.callback(ray.shutdown)
        yield lambda needs: stack.enter_context(contextlib.closing(RayLauncher(needs, names)))


@pytest.mark.parametrize(
    ("actor", "rollout", "expected"),
    [
        ((2, 2), (2, 2), ["0,1", "2,3"]),  # worker by worker
        ((2, 2), (2, 1), ["0", "2"]),
        ((4, 1), (2, 2), ["0,1", "2,3"]),  # each inference server has the GPUs of two workers of the actor
    ],
)
def test_colocated_workers_use_the_gpus_of_the_other_role(launcher_of, tmp_path, actor, rollout, expected):
    (tmp_path / "show_gpus.py").write_text(PROGRAM)
    needs = {
        "actor": RoleNeed(workers=actor[0], gpu=actor[1]),
        "rollout": RoleNeed(workers=rollout[0], gpu=rollout[1], beside="actor"),
    }
    launcher, shown = launcher_of(needs), {"actor": [], "rollout": []}
    for role, need in needs.items():
        for number in range(need.workers):
            log = tmp_path / f"{role}-{number}.log"
            environment = {"PYTHONPATH": str(tmp_path), "STAY_S": "60" if role == "actor" else "0"}
            task = launcher.launch(
                Task(role=role, number=number, module="show_gpus", environment=environment, log_file=log)
            )
            if role == "rollout":
                assert task.wait(60) == 0
                shown[role].append(log.read_text().strip())
    assert shown["rollout"] == expected


def test_after_a_failed_resize_no_group_is_left(launcher_of, monkeypatch):
    """Of two additional workers, one fits."""
    monkeypatch.setattr(ray_cluster, "_PLACE_S", 3.0)
    launcher = launcher_of({"rollout": RoleNeed(workers=1, gpu=2)})
    launcher._place("rollout", 0)
    with pytest.raises(EngineError, match=r"Ray has not found room for the workers of rollout \(2 x"):
        launcher.resize("rollout", 3)
    launcher.resize("rollout", 2)
    assert launcher._further["rollout"] != []
    with pytest.raises(EngineError, match=r"Ray has not found room for the workers of rollout \(1 x"):
        launcher.resize("rollout", 3)
    launcher.resize("rollout", 1)
    assert launcher._further["rollout"] == []


def test_nodes_with_one_address_count_separately(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=2)
        ray.init(cluster.address, log_to_driver=False)
        assert sorted(node["CPU"] for node in ray_cluster.nodes().values()) == [1.0, 2.0]
    finally:
        ray.shutdown()
        cluster.shutdown()
