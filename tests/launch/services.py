"""Real services for tests, on loopback addresses: etcd, a Ray cluster of two nodes, a Slurm cluster of two nodes.

Tests that need a missing one are skipped and name it: ``bash tests/launch/install.sh`` installs etcd and Slurm from Debian's
packages, and ``pip install "areno[ray,etcd]"`` the Python packages.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def own_folder(service: str) -> Iterator[Path]:
    """A folder with a short name: socket paths must be short."""
    folder = Path(f"/tmp/areno-{service}-{os.getpid()}")
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def end(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class EtcdServer:
    """A server that can be stopped and restarted with its data."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._port, self._peers = folder, free_port(), free_port()
        self.address = f"127.0.0.1:{self._port}"
        self.process = None
        self.start()

    def start(self) -> None:
        own, peers = f"http://{self.address}", f"http://127.0.0.1:{self._peers}"
        urls = ["--listen-client-urls", own, "--advertise-client-urls", own, "--listen-peer-urls", peers]
        with open(self.folder / "etcd.log", "ab") as log:
            self.process = subprocess.Popen(
                ["etcd", "--data-dir", str(self.folder / "data"), *urls], stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{own}/health", timeout=1) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.1)
        raise TimeoutError("etcd does not answer")

    def stop(self) -> None:
        end(self.process)


@pytest.fixture
def etcd_server(tmp_path):
    pytest.importorskip("etcd3gw")
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed: bash tests/launch/install.sh")
    server = EtcdServer(tmp_path)
    yield server
    server.stop()


def ray_start(*words: str, cpus: int = 1) -> list[str]:
    """The command that starts a node of a Ray cluster, and ends with the node."""
    ray = str(Path(sys.executable).with_name("ray"))
    shared = ["start", "--block", "--disable-usage-stats", f"--num-cpus={cpus}", "--object-store-memory=100000000"]
    return [ray, *shared, *words]


def ray_head(address: str, folder: Path, cpus: int = 1) -> list[str]:
    """The command that starts the head of a Ray cluster at HOST:PORT."""
    host, _, port = address.partition(":")
    place = [f"--node-ip-address={host}", f"--port={port}", f"--temp-dir={folder}"]
    return ray_start("--head", "--include-dashboard=false", *place, cpus=cpus)


class RayNodes:
    """Two nodes of a Ray cluster on this machine; ``nodes`` are their processes, the head first."""

    def __init__(self, folder: Path, cpus: int = 2) -> None:
        self.folder, self.nodes = folder, []
        self.address = "127.0.0.2:6399"
        self.environment = {**os.environ, "RAY_ADDRESS": self.address, "RAY_USAGE_STATS_ENABLED": "0"}
        # Otherwise, a token in the user's home, such as one of an earlier local cluster, would protect this cluster.
        self.environment["RAY_AUTH_MODE"] = "disabled"
        self._start(ray_head(self.address, folder, cpus))
        self._wait(1)
        self._second = ray_start(f"--address={self.address}", "--node-ip-address=127.0.0.3", cpus=cpus)
        self._start(self._second)
        self._wait(2)

    def _start(self, command: list[str]) -> None:
        with open(self.folder / f"node-{len(self.nodes)}.log", "ab") as log:
            self.nodes.append(
                subprocess.Popen(command, stdout=log, stderr=log, env=self.environment, start_new_session=True)
            )

    def _wait(self, count: int) -> None:
        program = (
            "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR');"
            "print(sum(node['Alive'] for node in ray.nodes()))"
        )
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                done = subprocess.run(
                    [sys.executable, "-c", program, self.address],
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                    env=self.environment,
                )
                if done.stdout.strip() == str(count):
                    return
            time.sleep(0.5)
        raise TimeoutError(f"the Ray cluster does not have {count} nodes")

    def restart_second(self) -> None:
        """Restart the second node, whose processes must have ended."""
        end(self.nodes.pop())
        self._start(self._second)
        self._wait(2)

    def close(self) -> None:
        for node in reversed(self.nodes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGTERM)
        for node in self.nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(15)
            end(node)


@pytest.fixture(scope="session")
def ray_nodes(tmp_path_factory):
    pytest.importorskip("ray")
    with own_folder("ray") as folder, contextlib.closing(RayNodes(folder)) as nodes:
        yield nodes


@pytest.fixture
def ray_cluster(ray_nodes, monkeypatch):
    """The Ray nodes, to which this process connects."""
    import ray

    monkeypatch.setenv("RAY_ADDRESS", ray_nodes.address)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    yield ray_nodes
    ray.shutdown()


SLURM_CONF = """\
ClusterName=areno
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
SlurmdTimeout=10
KillWait=10
InactiveLimit=0
MpiDefault=none
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1_port} CPUs=4 RealMemory=8000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2_port} CPUs=4 RealMemory=8000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


class SlurmNodes:
    """A Slurm cluster of two nodes on this machine, with daemons and a munge key of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, {}
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        folder.chmod(0o755)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        ports = {"ctld_port": free_port(), "n1_port": free_port(), "n2_port": free_port()}
        self.conf = folder / "slurm.conf"
        self.conf.write_text(SLURM_CONF.format(folder=folder, host=socket.gethostname(), **ports))
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        try:
            self._start_all(key)
        except BaseException:
            self.close()
            raise

    def _start_all(self, key: Path) -> None:
        folder = self.folder
        self.start("munged", ["--force", "--foreground", f"--key-file={key}", f"--socket={folder}/munge.socket"])
        wait_for(lambda: (folder / "munge.socket").exists(), "munged")
        self.start("slurmctld", ["-D", "-f", str(self.conf), "-c"])
        for node in ("n1", "n2"):
            self.start(f"slurmd {node}", ["-D", "-f", str(self.conf), "-N", node])
        wait_for(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2", "both nodes")

    def start(self, name: str, arguments: list[str]) -> None:
        command = [name.split()[0], *arguments]
        if command[0] == "munged":
            own = [f"--{what}-file={self.folder}/munged.{what}" for what in ("pid", "log", "seed")]
            command += own
        with open(self.folder / f"{name.replace(' ', '-')}.out", "ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )

    def run(self, *command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=60, check=False)
        return done.stdout

    def close(self) -> None:
        self.run("scancel", "--user=root")
        for process in reversed(self.processes.values()):
            end(process)
        subprocess.run(["pkill", "-f", f"slurmstepd.*{self.folder}"], check=False)


def wait_for(condition, what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not ready within {timeout_s:g} s")
        time.sleep(0.2)


@pytest.fixture(scope="session")
def slurm_nodes(tmp_path_factory):
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed; bash tests/launch/install.sh")
    if os.geteuid():
        pytest.skip("slurmd runs as root only")
    with own_folder("slurm") as folder, contextlib.closing(SlurmNodes(folder)) as nodes:
        yield nodes
