"""The GRPO example on a Ray cluster and as a Slurm job, on two nodes each, gives the samples and weights of one machine.

All tests use real services on this machine (:mod:`tests.launch.services`). At zero staleness every run draws the same
samples. The batch size of a decode step depends on timing, and so do the last bits of log-probs; in SFT, which has no
rollout, the weights equal those of one machine bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areno.rewards.supervisor import descendants
from examples.experiments import toy
from tests.launch.services import wait_for
from tests.support.vllm import VLLM, make_wide_toy, needs_vllm

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("ray")]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples/experiments"
STEPS, RATE = 8, 0.004
LAYOUT = (
    f"total_train_steps={STEPS}",
    "rollout.max_head_offpolicyness=0",
    "rollout.backend=areno:d2",
    "actor.backend=fsdp:d2",
    "actor.fsdp.shard_weights=false",
    "actor.scheduling_spec.0.cpu=1",
    "rollout.scheduling_spec.0.cpu=1",
)


SFT = ("total_train_steps=4", "actor.backend=fsdp:d2", "actor.scheduling_spec.0.cpu=1")


def start(folder: Path, trial: str, *words: str, environment=None, output=subprocess.PIPE) -> subprocess.Popen:
    example, layout = (EXAMPLES / "sft.yaml", SFT) if trial.startswith("sft") else (EXAMPLES / "grpo.yaml", LAYOUT)
    command = [sys.executable, "-m", "areno", "run", str(example), f"cluster.fileroot={folder}", f"trial_name={trial}"]
    return subprocess.Popen(
        [*command, *layout, *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(folder: Path, trial: str, *words: str, environment=None, code=0) -> str:
    process = start(folder, trial, *words, environment=environment)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def logs(folder: Path, trial: str) -> Path:
    (found,) = folder.glob(f"logs/*/toy/{trial}")
    return found


def rewards(folder: Path, trial: str) -> list[float]:
    rows = map(json.loads, (logs(folder, trial) / "metrics.jsonl").read_text().splitlines())
    return [row["rollout/reward"] for row in rows if "rollout/reward" in row]


def weights(folder: Path, trial: str) -> dict[str, torch.Tensor]:
    found = sorted(
        folder.glob(f"checkpoints/*/toy/{trial}/**/model.safetensors"), key=lambda path: path.stat().st_mtime
    )
    return load_file(found[-1])


def assert_same(folder: Path, trial: str) -> None:
    here, there = weights(folder, "here"), weights(folder, trial)
    assert here.keys() == there.keys()
    assert max(float((here[name] - there[name]).abs().max()) for name in here) < RATE / 100
    assert rewards(folder, trial) == rewards(folder, "here")


def assert_same_bits(folder: Path, trial: str) -> None:
    here, there = weights(folder, "sft"), weights(folder, trial)
    assert all(torch.equal(here[name], there[name]) for name in here)


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    toy.make_toy(folder)
    run(folder, "here")
    found = rewards(folder, "here")
    assert len(found) == STEPS
    assert found[-1] > found[0] + 0.2  # it learns
    run(folder, "sft")
    return folder


# -- Ray -------------------------------------------------------------------------------------------------------------


def ray_words(names="nfs"):
    return ("scheduler.type=ray", "cluster.n_nodes=2", f"cluster.name_resolve.type={names}")


@pytest.mark.parametrize("names", ["nfs", "ray"])
def test_a_run_on_two_ray_nodes_equals_a_local_run(toys, ray_nodes, names):
    trial = f"ray_{names}"
    run(toys, trial, *ray_words(names), environment=ray_nodes.environment)
    assert_same(toys, trial)


@pytest.mark.parametrize("shards", ["false", "true"])
def test_supervised_training_on_ray_gives_the_same_bits(toys, ray_nodes, shards):
    trial = f"sft_ray_{shards}"
    run(toys, trial, *ray_words(), f"actor.fsdp.shard_weights={shards}", environment=ray_nodes.environment)
    assert_same_bits(toys, trial)


def test_a_run_on_ray_with_names_in_etcd_equals_a_local_run(toys, ray_nodes, etcd_server):
    etcd = f"cluster.name_resolve.etcd3_addr={etcd_server.address}"
    run(toys, "ray_etcd", *ray_words("etcd3"), etcd, environment=ray_nodes.environment)
    assert_same(toys, "ray_etcd")


def test_the_error_names_what_ray_lacks(toys, ray_nodes, monkeypatch):
    wanted = {"RAY_ADDRESS": ray_nodes.address, "RAY_AUTH_MODE": "disabled"}
    words = [*ray_words(), "actor.scheduling_spec.0.cpu=64"]
    output = run(toys, "ray_large", *words, environment=wanted, code=2)
    assert "no node of the cluster has 64 CPU, which a worker of actor needs" in output
    output = run(toys, "ray_many", "scheduler.type=ray", "cluster.n_nodes=3", environment=wanted, code=2)
    assert "cluster.n_nodes is 3, but the ray cluster has only 2 nodes" in output
    output = run(toys, "ray_none", *ray_words(), environment={"RAY_ADDRESS": "127.0.0.1:9"}, code=2)
    assert "no Ray cluster at 127.0.0.1:9" in output


def scale(folder: Path, trial: str, replicas: int) -> None:
    command = [sys.executable, "-m", "areno", "scale", str(logs(folder, trial)), str(replicas), "--timeout", "120"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.endswith(f"replicas: {replicas}\n"), done.stdout + done.stderr


def grows_and_shrinks(folder: Path, trial: str, *words: str, environment: dict[str, str]) -> None:
    """Scale from one replica to two and back, while the run continues."""
    long = ("total_train_steps=4000", "total_train_epochs=1000", "rollout.backend=areno:d1")
    output = folder / f"{trial}.txt"  # more than a pipe holds
    with output.open("w") as out:
        process = start(folder, trial, *words, *long, environment=environment, output=out)
    wait_for(first_step(folder, trial), "the first step", 120)
    before = set(workers())
    scale(folder, trial, 2)
    (joined,) = set(workers()) - before
    seen = len(rewards(folder, trial))
    wait_for(lambda: len(rewards(folder, trial)) > seen + 2, "further steps", 60)
    scale(folder, trial, 1)
    assert joined not in workers()
    seen = len(rewards(folder, trial))
    wait_for(lambda: len(rewards(folder, trial)) > seen + 2, "further steps", 60)
    process.send_signal(signal.SIGINT)  # on Slurm it cancels the job as well
    process.wait(timeout=90)
    assert "Traceback" not in output.read_text()


@needs_vllm
def test_vllm_servers_on_ray(ray_nodes, tmp_path):
    """Ray starts the server."""
    make_wide_toy(tmp_path)
    words = ["rollout.backend=vllm:d1", f"vllm.command={VLLM} serve", "vllm.enforce_eager=true", "total_train_steps=4"]
    output = run(tmp_path, "ray_vllm", *ray_words(), *words, environment=ray_nodes.environment)
    assert "weights of version 1 arrived: log-probs differ by" in output
    assert len(rewards(tmp_path, "ray_vllm")) == 4


def test_replicas_join_and_leave_on_ray(toys, ray_nodes):
    grows_and_shrinks(toys, "ray_scale", *ray_words(), environment=ray_nodes.environment)


def test_the_error_says_that_ray_has_no_room_for_more_replicas(toys, ray_nodes):
    words = [*ray_words(), "total_train_steps=4000", "total_train_epochs=1000"]
    with (toys / "ray_full.txt").open("w") as out:
        process = start(toys, "ray_full", *words, environment=ray_nodes.environment, output=out)
    try:
        wait_for(first_step(toys, "ray_full"), "the first step", 120)
        command = [sys.executable, "-m", "areno", "scale", str(logs(toys, "ray_full")), "3"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "Ray has not found room for the workers of rollout (1 x" in done.stderr
        seen = len(rewards(toys, "ray_full"))
        wait_for(lambda: len(rewards(toys, "ray_full")) > seen + 2, "further steps", 60)
    finally:  # else it occupies the nodes in later tests
        process.terminate()
        process.wait(timeout=90)


def workers() -> list[int]:
    """Processes of an experiment's workers, wherever the scheduler has started them."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
            environment = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:
            continue
        if b"areno.engine.parallel.worker" in command and b"ARENO_NODE=" in environment and b"srun" not in command:
            found.append(int(entry))
    return found


def first_step(folder: Path, trial: str):
    return lambda: any(folder.glob(f"logs/*/toy/{trial}/metrics.jsonl")) and len(rewards(folder, trial)) > 0


def test_a_killed_replica_on_ray_is_restarted(toys, ray_nodes):
    process = start(toys, "ray_kill", *ray_words(), environment=ray_nodes.environment)
    wait_for(first_step(toys, "ray_kill"), "the first step", 120)
    os.kill(max(workers()), signal.SIGKILL)  # the replicas are started last
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    log = (logs(toys, "ray_kill") / "main.log").read_text()
    assert "was killed by signal 9" in log
    assert "was restarted" in log
    assert_same(toys, "ray_kill")


def test_a_killed_driver_leaves_no_workers_on_ray(toys, ray_nodes):
    process = start(toys, "ray_driver", *ray_words(), environment=ray_nodes.environment)
    wait_for(first_step(toys, "ray_driver"), "the first step", 120)
    assert workers()
    process.kill()
    process.wait()
    wait_for(lambda: not workers(), "the end of all workers", 30)


def test_a_lost_ray_node_ends_the_run_within_a_minute(toys, ray_nodes):
    process = start(toys, "ray_node", *ray_words(), environment=ray_nodes.environment)
    wait_for(first_step(toys, "ray_node"), "the first step", 120)
    node = ray_nodes.nodes[1]
    below = descendants(node.pid)
    began = time.monotonic()
    for pid in (*below, node.pid):
        with suppress(ProcessLookupError):  # some end with their parent
            os.kill(pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    took = time.monotonic() - began
    ray_nodes.restart_second()
    assert process.returncode != 0
    assert took < 60
    assert "127.0.0.3" in output


# -- Slurm -----------------------------------------------------------------------------------------------------------

SLURM = (
    "scheduler.type=slurm",
    "cluster.n_nodes=2",
    "cluster.n_gpus_per_node=0",
    "actor.scheduling_spec.0.srun_additional_args=-K",
)
SLURM_ROLLOUT = (*SLURM, "rollout.scheduling_spec.0.srun_additional_args=-K")


def test_a_slurm_job_on_two_nodes_equals_a_local_run(toys, slurm_nodes):
    output = run(toys, "slurm", *SLURM_ROLLOUT, environment=slurm_nodes.environment)
    assert "was submitted" in output
    assert_same(toys, "slurm")
    assert slurm_nodes.run("squeue", "-h") == ""
    run(toys, "sft_slurm", *SLURM, environment=slurm_nodes.environment)
    assert_same_bits(toys, "sft_slurm")


def test_a_cancelled_job_leaves_no_process(toys, slurm_nodes):
    process = start(toys, "slurm_cancel", *SLURM_ROLLOUT, environment=slurm_nodes.environment)
    wait_for(first_step(toys, "slurm_cancel"), "the first step", 120)
    slurm_nodes.run("scancel", "--user=root")
    output, _ = process.communicate(timeout=90)
    assert process.returncode != 0, output
    wait_for(lambda: not workers(), "the end of all workers", 30)
    wait_for(lambda: slurm_nodes.run("squeue", "-h") == "", "the end of the job", 60)


def test_a_killed_replica_on_slurm_is_restarted(toys, slurm_nodes):
    process = start(toys, "slurm_kill", *SLURM_ROLLOUT, environment=slurm_nodes.environment)
    wait_for(first_step(toys, "slurm_kill"), "the first step", 120)
    os.kill(max(workers()), signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "was restarted" in (logs(toys, "slurm_kill") / "main.log").read_text()
    assert_same(toys, "slurm_kill")


def test_replicas_join_and_leave_on_slurm(toys, slurm_nodes):
    grows_and_shrinks(toys, "slurm_scale", *SLURM_ROLLOUT, environment=slurm_nodes.environment)
