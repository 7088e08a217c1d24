"""From settings to scheduler requests: needs of roles, Slurm commands, and checks before Ray is asked."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from areno.cli.main import main
from areno.config.experiment.notices import notice
from areno.errors import EngineError, UsageError
from areno.experiments.cluster import name_options, needs_of
from areno.experiments.slurm_job import batch_script
from areno.launch.launcher import RoleNeed, Task
from areno.launch.placement import most_on_a_node, place_workers
from areno.launch.ray_cluster import refuse_impossible
from areno.launch.slurm_steps import address_of, step_command
from areno.python_process import python_command
from tests.config.experiment.samples import rl

TASK = Task(role="actor", number=0, module="some.module")
SLURM = {"scheduler__type": "slurm", "cluster__n_nodes": 2, "cluster__n_gpus_per_node": 8}


def spec(**values):
    return [{"cpu": None, **values}]


def test_worker_needs_follow_the_scheduling_specs():
    given = {
        "gpu": 2,
        "mem": 16,
        "cpu": 3,
        "env_vars": {"A": 1},
        "cmd": "numactl -N0 python3 -m other.worker",
        "additional_bash_cmds": ["module load cuda"],
        "image": "/images/own.sif",
        "mount": "/data:/data",
        "nodelist": "n[1-2]",
        "exclude": "n3",
        "srun_additional_args": "-K --chdir $PWD",
        "ray_placement_strategy": "separate",
    }
    config = rl(**SLURM, actor__scheduling_spec=spec(**given), rollout__backend="areno:d2t2", actor__backend="fsdp:d4")
    actor, rollout = needs_of(config, gpus=True).values()
    assert (actor.workers, actor.together, rollout.workers, rollout.together) == (4, 1, 4, 2)
    assert (actor.cpu, actor.gpu, actor.mem, actor.env_vars) == (6, 2, 16, {"A": "1"})
    assert (rollout.cpu, rollout.gpu, rollout.mem) == (8, 1, None)  # 8 cores for each GPU; no memory is requested
    assert (actor.nodelist, actor.exclude, actor.ray_placement_strategy) == ("n[1-2]", "n3", "separate")
    command = actor.command(TASK)
    assert command[:2] == ["bash", "-c"]
    assert command[2].splitlines() == ["set -e", "module load cuda", 'exec "$@"']
    container = ["apptainer", "exec", "--nv", "--bind", "/data:/data", "/images/own.sif"]
    assert command[4:] == [*container, "numactl", "-N0", "python3", "-m", "some.module"]
    on_cpus = needs_of(rl(scheduler__type="ray"), gpus=False)
    assert {(need.cpu, need.gpu) for need in on_cpus.values()} == {(1, 0)}
    assert on_cpus["actor"].command(TASK) == [*python_command(), "-m", "some.module"]


@pytest.mark.parametrize("cmd", ["python3 -m another.rpc_server", "python -m x", None])
def test_the_worker_command_of_another_program_is_replaced(cmd):
    """Most published configurations name one."""
    assert RoleNeed(cmd=cmd).command(TASK) == [*python_command(), "-m", "some.module"]


def test_servers_take_the_devices_of_all_their_ranks():
    config = rl(**SLURM, rollout__backend="vllm:d2t4", vllm__command="vllm serve")
    need = needs_of(config, gpus=True)["rollout"]
    assert (need.workers, need.together, need.gpu, need.cpu) == (2, 1, 4, 32)


def test_colocated_roles_share_their_placement():
    strategy = {"type": "colocation", "target": "actor"}
    config = rl(**SLURM, rollout__scheduling_strategy=strategy, rollout__backend="areno:d2", actor__backend="fsdp:d2")
    needs = needs_of(config, gpus=True)
    assert needs["rollout"].beside == "actor"
    placed = place_workers(needs, ["a", "b"], 1)
    assert placed == {"actor": ["a", "b"], "rollout": ["a", "b"]}
    assert most_on_a_node(needs, placed) == (16, 1, 0)
    assert "--overlap" in step_command(needs["rollout"], "s", "a")
    config.rollout.scheduling_strategy.fork = False  # one engine that trains and generates in turn
    assert list(needs_of(config, gpus=True)) == ["actor"]


def test_workers_are_spread_over_nodes():
    needs = {"actor": RoleNeed(workers=4, gpu=1, cpu=8), "rollout": RoleNeed(workers=4, together=2, gpu=1, cpu=8)}
    assert place_workers(needs, ["a", "b"], 4) == {"actor": ["a"] * 4, "rollout": ["b"] * 4}
    with pytest.raises(UsageError, match=r"4 workers of rollout need . GPUs each, but .* on 2 nodes with 3 GPUs each"):
        place_workers(needs, ["a", "b"], 3)
    with pytest.raises(
        UsageError, match=r"engine of rollout needs 2 GPUs on a single node, but a node has 1; .* rollout\.backend"
    ):
        place_workers({"rollout": needs["rollout"]}, ["a", "b", "c", "d"], 1)
    cpus = {"actor": RoleNeed(workers=2), "rollout": RoleNeed(workers=2, exclude="a")}
    assert place_workers(cpus, ["a", "b"], 0) == {"actor": ["a", "b"], "rollout": ["b", "b"]}
    with pytest.raises(UsageError, match=r"rollout\.scheduling_spec allows none of the nodes a"):
        place_workers(cpus, ["a"], 0)


@pytest.mark.parametrize(
    ("actor", "rollout", "gpus_per_node", "expected"),
    [
        ((4, 1), (2, 2), 2, ["n0", "n1"]),  # each inference server has the GPUs of two workers of the actor
        ((4, 1), (1, 2), 2, ["n0"]),
        ((4, 1), (4, 1), 2, ["n0", "n0", "n1", "n1"]),
        ((2, 2), (2, 2), 2, ["n0", "n1"]),  # worker by worker
        ((2, 2), (2, 1), 2, ["n0", "n1"]),
        ((4, 2), (2, 3), 4, ["n0", "n1"]),
    ],
)
def test_colocated_workers_are_on_the_nodes_of_the_gpus_that_they_share(actor, rollout, gpus_per_node, expected):
    needs = {
        "actor": RoleNeed(workers=actor[0], gpu=actor[1]),
        "rollout": RoleNeed(workers=rollout[0], gpu=rollout[1], beside="actor"),
    }
    assert place_workers(needs, ["n0", "n1"], gpus_per_node)["rollout"] == expected


def test_a_colocated_worker_cannot_use_the_gpus_of_two_nodes():
    needs = {"actor": RoleNeed(workers=4, gpu=1), "rollout": RoleNeed(workers=1, gpu=4, beside="actor")}
    with pytest.raises(
        UsageError,
        match=r"worker of rollout needs 4 GPUs on one node, .* shares with actor .* \(n0, n0, n1, n1\); .* rollout\.backend",
    ):
        place_workers(needs, ["n0", "n1"], 2)


def test_roles_are_colocated_only_if_the_gpus_of_the_target_suffice():
    strategy = {"type": "colocation", "target": "actor"}
    sizes = {"rollout__scheduling_strategy": strategy, "rollout__backend": "areno:d2", "actor__backend": "fsdp:d2"}
    for of_actor, of_rollout, beside in ((1, 1, "actor"), (2, 2, "actor"), (2, 1, "actor"), (1, 2, "")):
        specs = {"actor__scheduling_spec": spec(gpu=of_actor), "rollout__scheduling_spec": spec(gpu=of_rollout)}
        assert needs_of(rl(**SLURM, **sizes, **specs), gpus=True)["rollout"].beside == beside
    sizes |= {"rollout__backend": "vllm:d2t2", "actor__backend": "fsdp:d4", "vllm__command": "vllm serve"}
    rollout = needs_of(rl(**SLURM, **sizes), gpus=True)["rollout"]
    assert (rollout.workers, rollout.gpu, rollout.beside) == (2, 2, "actor")


def test_the_command_of_a_slurm_step(monkeypatch):
    monkeypatch.setenv("PWD", "/some where")
    need = RoleNeed(cpu=4, gpu=2, mem=16, srun_additional_args="--unbuffered --mpi=pmi2 -K --chdir '$PWD'")
    words = step_command(need, "rollout-0-x", "n1")
    assert words[0] == "srun"
    expected = {"--export=ALL", "--nodes=1", "--ntasks=1", "--nodelist=n1", "--job-name=rollout-0-x", "--exact"}
    expected |= {"--cpus-per-task=4", "--mem=32768", "--gres=gpu:2", "--unbuffered", "--mpi=pmi2", "-K"}
    assert expected | {"--chdir", "/some where"} == set(words[1:])


def test_a_node_address_that_does_not_resolve_is_reported(tmp_path, monkeypatch):
    """A script stands in for Slurm's scontrol, because the test needs no cluster."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "NodeName=$3 NodeAddr=n7.invalid NodeHostName=$3"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(EngineError, match=r"the address n7\.invalid of node n7 cannot be resolved"):
        address_of("n7")


def test_the_batch_script_of_a_slurm_job():
    more = {
        "actor__backend": "fsdp:d8",
        "rollout__backend": "areno:d8",
        "recover__mode": "auto",
        "recover__freq_steps": 1,
    }
    script = batch_script(rl(**SLURM, **more), ["areno", "run", "a file.yaml"])
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in script.splitlines() if "#SBATCH" in line
    )
    assert (options["nodes"], options["cpus-per-task"], options["gres"]) == ("2", "64", "gpu:8")
    assert "requeue" in options
    assert "mem" not in options
    assert shlex.join(["areno", "run", "a file.yaml"]) in script
    assert 'scancel --signal=TERM "$SLURM_JOB_ID.0"' in script
    script = batch_script(rl(**SLURM), ["areno"])
    assert "#SBATCH --no-requeue" in script
    # The job must contain the nodes that one role asks for, also if other roles run anywhere.
    chosen = batch_script(rl(**SLURM, actor__scheduling_spec=spec(nodelist="n7,n8")), ["areno"])
    assert "#SBATCH --nodelist=n7,n8" in chosen
    # Five workers with one GPU of 16 GB each on two nodes with two and four GPUs: the fuller node needs 64 GB.
    memory = {f"{role}__scheduling_spec": spec(mem=16) for role in ("actor", "rollout")}
    sizes = {"actor__backend": "fsdp:d4", "rollout__backend": "areno:d1", "cluster__n_gpus_per_node": 4}
    assert "#SBATCH --mem=64G" in batch_script(rl(**{**SLURM, **memory, **sizes}), ["areno"])


def test_impossible_requests_are_refused_before_ray_is_asked():
    nodes = {"10.0.0.1": {"CPU": 8.0, "memory": 2.0**33}, "10.0.0.2": {"CPU": 4.0}}
    refuse_impossible({"actor": RoleNeed(workers=3, cpu=4)}, nodes)
    for need, words in (
        (RoleNeed(cpu=9), "no node of the cluster has 9 CPU, which a worker of actor needs"),
        (
            RoleNeed(gpu=1),
            r"no node of the cluster has 1 CPU, 1 GPU, .* 10\.0\.0\.1 with 8 CPU, 8 GB of memory; 10\.0\.0\.2",
        ),
        (RoleNeed(mem=9), "1 CPU, 9 GB of memory"),
        (RoleNeed(workers=13), "the roles together need 13 CPUs, but the cluster has 12"),
    ):
        with pytest.raises(UsageError, match=words):
            refuse_impossible({"actor": need}, nodes)
    shared = {"actor": RoleNeed(workers=2, gpu=1), "rollout": RoleNeed(workers=2, gpu=1, beside="actor")}
    refuse_impossible(shared, {"10.0.0.1": {"CPU": 8.0, "GPU": 2.0}})


def test_names_are_stored_below_fileroot_unless_another_folder_is_set(tmp_path):
    config = rl(scheduler__type="ray", cluster__fileroot=str(tmp_path))
    assert Path(name_options(config).nfs_record_root) == tmp_path / "name_resolve"
    config = rl(scheduler__type="ray", cluster__name_resolve={"nfs_record_root": "/shared/names"})
    assert name_options(config).nfs_record_root == "/shared/names"
    given = {"type": "etcd3", "etcd3_addr": "h:1", "ray_actor_name": "kv"}
    options = name_options(rl(scheduler__type="ray", cluster__name_resolve=given))
    assert (options.type, options.etcd3_addr, options.ray_actor_name) == ("etcd3", "h:1", "kv")


def test_cluster_settings_are_listed_as_unused_where_they_have_no_effect():
    given = {"actor__scheduling_spec": spec(nodelist="n1", exclude="n2", ray_placement_strategy="separate")}
    here, ray, slurm = (notice(rl(**given, **kind)) for kind in ({}, {"scheduler__type": "ray"}, SLURM))
    assert all(name in here for name in ("nodelist", "exclude", "ray_placement_strategy"))
    assert "nodelist" not in ray
    assert "exclude" in ray
    assert "ray_placement_strategy" in slurm
    assert "nodelist" not in slurm


def test_launch_shows_the_job_and_starts_nothing(tmp_path, capsys):
    example = str(Path(__file__).parents[2] / "examples/experiments/grpo.yaml")
    words = ["launch", example, f"cluster.fileroot={tmp_path}"]
    assert main([*words, "scheduler.type=slurm", "cluster.n_nodes=2", "cluster.n_gpus_per_node=0"]) == 0
    assert "#SBATCH --nodes=2" in capsys.readouterr().out
    assert main([*words, "scheduler.type=ray", "rollout.backend=areno:d3"]) == 0
    assert "rollout: 3 workers (ray_placement_strategy=shared), each with 8 CPUs, 1 GPUs" in capsys.readouterr().out
    assert main(words) == 2
    assert "set scheduler.type to ray or slurm" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
