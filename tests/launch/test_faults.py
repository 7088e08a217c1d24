"""Failures between machines, with real services: a partitioned network, a full shared disk, a node whose daemon is killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from areno.engine.parallel.group import EngineGroup
from areno.engine.parallel.layout import Layout
from areno.engine.parallel.workers import Processes
from areno.errors import EngineError
from areno.launch.launcher import RoleNeed
from areno.rollouts.fleet.weight_transfer import WeightOptions
from examples.experiments import toy
from tests.experiments.fleet.conftest import config, open_fleet, policy  # noqa: F401 - fixtures
from tests.experiments.fleet.support import answers, learn, requests, wait_until
from tests.launch.loopback import LoopbackLauncher
from tests.launch.services import wait_for
from tests.launch.test_cluster_runs import SLURM_ROLLOUT, first_step, logs, rewards, run, start, workers

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("ray")]


# -- a network that is cut -------------------------------------------------------------------------------------------


class Network:
    """A network namespace as a second machine, with a cable that can be cut."""

    HERE, THERE = "10.213.7.1", "10.213.7.2"

    def __init__(self) -> None:
        self.name = f"ar{uuid.uuid4().hex[:8]}"
        self._cable = self.name
        far = f"{self._cable}b"
        self._ip("netns", "add", self.name)
        self._ip("link", "add", self._cable, "type", "veth", "peer", "name", far, "netns", self.name)
        self._ip("addr", "add", f"{self.HERE}/24", "dev", self._cable)
        self._ip("-n", self.name, "addr", "add", f"{self.THERE}/24", "dev", far)
        self._ip("link", "set", self._cable, "up")
        for device in (far, "lo"):
            self._ip("-n", self.name, "link", "set", device, "up")

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def cut(self) -> None:
        self._ip("link", "set", self._cable, "down")

    def mend(self) -> None:
        self._ip("link", "set", self._cable, "up")

    def close(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self._ip("netns", "del", self.name)


@pytest.fixture
def network():
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, and `ip`")
    try:
        made = Network()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield made
    made.close()


def far_launcher(network, folder, role):
    """A launcher that runs the workers of one role on the second machine."""
    needs = {"actor": RoleNeed(workers=2), "rollout": RoleNeed(workers=2), "": RoleNeed()}

    needs[role] = RoleNeed(workers=2, cmd=f"ip netns exec {network.name} {sys.executable}")
    return LoopbackLauncher(folder, needs, host=network.HERE)


def test_ranks_behind_a_cut_network_end_the_update_within_a_minute(policy, network, tmp_path):  # noqa: F811
    launcher = far_launcher(network, tmp_path, "actor")
    group = EngineGroup(
        str(policy),
        config(),
        Layout(2, 1),
        processes=Processes(launcher=launcher, role="actor", threads=1, startup_s=120),
    )
    learn(group, 0)
    pids = group.workers.pids
    network.cut()
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"rank \d of 2 \(process \d+ on node-\d\)"):
        learn(group, 1)
    assert time.monotonic() - began < 60
    group.close()
    launcher.close()
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "the end of the ranks", 200)


def test_a_replica_behind_a_cut_network_is_restarted_once_the_network_is_back(
    policy,  # noqa: F811
    open_fleet,  # noqa: F811
    network,
    tmp_path,
):
    launcher = far_launcher(network, tmp_path, "rollout")
    weights = WeightOptions(mode="xccl", weight_chunked_mem_mb=1)
    fleet = open_fleet(replicas=1, weights=weights, launcher=launcher)
    before = answers(fleet, requests(3))
    network.cut()
    began = time.monotonic()
    wait_until(lambda: fleet.health().replicas[0].worker.state != "ready", 60)
    assert time.monotonic() - began < 60
    network.mend()
    wait_until(lambda: fleet.health().replicas[0].worker.state == "ready", 120)
    assert answers(fleet, requests(3)) == before
    launcher.close()


# -- a full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", str(folder)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


def test_a_full_shared_disk_ends_the_run_and_is_named_and_the_run_resumes_later(small_disk):
    toy.make_toy(small_disk)
    words = ("recover.mode=auto", "recover.freq_steps=1", "saver.freq_steps=1", "total_train_steps=60")
    process = start(small_disk, "full", *words)
    wait_for(first_step(small_disk, "full"), "the first step", 120)
    filler, began = small_disk / "filler", time.monotonic()
    with contextlib.suppress(OSError), open(filler, "wb") as file:
        while True:
            file.write(b"\0" * 65536)
            file.flush()
    output, _ = process.communicate(timeout=120)
    assert process.returncode not in (0, None), output
    assert time.monotonic() - began < 60
    assert "a checkpoint needs" in output or "No space left on device" in output
    assert str(small_disk) in output
    before = len(rewards(small_disk, "full"))
    filler.unlink()
    run(
        small_disk,
        "full",
        "recover.mode=auto",
        "total_train_steps=8" if before < 8 else f"total_train_steps={before + 1}",
    )


# -- a node of Slurm whose daemon is killed ---------------------------------------------------------------------------


def of_node(name: bytes) -> list[int]:
    """Processes of jobs on a node, and the daemons of their steps."""
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError):
            if b"SLURMD_NODENAME=" + name + b"\0" in Path(f"/proc/{entry}/environ").read_bytes():
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
                found |= {int(entry), parent}
    return sorted(found - {1})


def test_a_killed_slurmd_ends_the_job_within_a_minute_and_is_named(slurm_nodes, tmp_path):
    toy.make_toy(tmp_path)
    process = start(
        tmp_path,
        "slurmd",
        *SLURM_ROLLOUT,
        "total_train_steps=2000",
        "total_train_epochs=999",
        environment=slurm_nodes.environment,
    )
    wait_for(first_step(tmp_path, "slurmd"), "the first step", 120)
    daemon = slurm_nodes.processes.pop("slurmd n2")
    began = time.monotonic()
    for pid in (daemon.pid, *of_node(b"n2")):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    daemon.wait()
    output, _ = process.communicate(timeout=180)
    assert process.returncode != 0, output
    assert time.monotonic() - began < 60
    assert "n2" in output
    wait_for(lambda: not workers(), "the end of all workers", 60)
    assert logs(tmp_path, "slurmd").exists()
    slurm_nodes.start("slurmd n2", ["-D", "-f", str(slurm_nodes.conf), "-N", "n2"])
    wait_for(lambda: slurm_nodes.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2", "both nodes", 90)
