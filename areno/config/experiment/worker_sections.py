"""Sections that say where workers run and how they find each other: cluster, name resolving, scheduler."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from areno.config.experiment.settings import Problems, idle, section, setting

DEFAULT_FILEROOT = "~/.local/share/areno/"
"""Of the user's own: what is read back from a folder for all, such as /tmp, could have been written by anybody."""

DEFAULT_RECORD_ROOT = "/tmp/areno/name_resolve"
_REMOTE_REWARD = (
    "an external reward service is not supported; remove it, and write reward.fn=file.py:NAME or reward.path=MODEL"
)
ON_CLUSTERS = "read where scheduler.type is ray or slurm"
ON_SLURM = "read where scheduler.type is slurm"
ON_RAY = "read where scheduler.type is ray"
READ_BY = {ON_CLUSTERS: ("ray", "slurm"), ON_SLURM: ("slurm",), ON_RAY: ("ray",)}
"""Schedulers with which a setting changes something, by the reason why it does not with others."""

_cluster = partial(setting, no_effect=ON_CLUSTERS)
_slurm = partial(setting, no_effect=ON_SLURM)
_worker = partial(setting, no_effect="areno starts its processes itself")
_remote = partial(setting, refused=_REMOTE_REWARD)


@dataclass
class NameResolveConfig:
    """Where workers publish their addresses."""

    type: str = setting(
        "nfs",
        "nfs keeps one file per name, etcd3 asks an etcd server, ray an actor; memory lives in one process.",
        choices=("nfs", "memory", "etcd3", "ray"),
    )
    nfs_record_root: str = _cluster(
        DEFAULT_RECORD_ROOT,
        "Folder of the files of nfs, seen by all machines.",
        documented="/tmp/areal/name_resolve",
        shown=f"{DEFAULT_RECORD_ROOT} (ray, slurm: name_resolve below cluster.fileroot)",
    )
    etcd3_addr: str = _cluster("localhost:2379", "Address of an etcd server, as every machine reaches it.")
    ray_actor_name: str = _cluster("ray_kv_store", "Name of the Ray actor that holds the names.")


@dataclass
class ClusterSpecConfig:
    """The machines, and the folder that they share."""

    name_resolve: NameResolveConfig = section(NameResolveConfig, "Where workers publish their addresses.")
    cluster_name: str = _worker("local", "Name of the cluster, written into the run's description.")
    fileroot: str = setting(DEFAULT_FILEROOT, "Root of logs and checkpoints; every machine must see it.")
    n_nodes: int = setting(
        1,
        "Number of machines.",
        minimum=1,
        documented=32,
        shown="1 (page: 32)",
    )
    n_gpus_per_node: int | None = setting(
        None,
        "Devices per machine; 0 is a machine without a GPU, where processes share the CPU.",
        minimum=0,
        documented=8,
        shown="what this machine has (node: 8)",
    )


@dataclass
class SchedulerConfig:
    """Who starts the worker processes."""

    type: str | None = setting(
        None,
        "local starts processes on this machine, ray on a Ray cluster, slurm on the nodes of a job; null means local.",
        choices=("local", "ray", "slurm"),
    )
    endpoint: str = _worker("http://localhost:8081", "Address of an external scheduling service.")
    deploy_mode: str = _worker("separation", "How an external service places rollout and training.")
    functioncall_service_domain: str = _remote("http://localhost:8080", "Address of an external reward service.")
    reward_functioncall_config: dict[str, Any] = setting(
        {}, "Settings of an external reward service.", refused=_REMOTE_REWARD
    )
    reward_model_path: str = _remote("", "Model of an external reward service.")
    reward_model_service_url: str = _remote("http://localhost:30000/classify", "Address of its classifier.")


@dataclass
class SchedulingSpec:
    """What one worker of a role needs."""

    cpu: int | None = setting(
        None, "CPU cores: the threads that the worker computes with.", minimum=1, shown="this machine's share (node: 8)"
    )
    gpu: int = _cluster(0, "GPUs of a worker; 0 is one where the nodes have GPUs.", minimum=0)
    mem: int = _cluster(32, "Memory in GB, for each GPU; 32 asks for a share of the node.", minimum=1)
    port_count: int = _worker(2, "Ports that the worker may open.", minimum=1)
    image: str = _slurm("", "Container image; empty runs on the node itself.")
    task_type: str = _worker("worker", "What the worker runs.", choices=("worker", "engine"))
    env_vars: dict[str, Any] = setting({}, "Environment variables of the worker.")
    cmd: str | None = _cluster(
        None, "Command that starts Python, such as numactl -N0 python3; behind -m stands areno's own worker."
    )
    srun_additional_args: str = _slurm("--unbuffered --mpi=pmi2 -K --chdir $PWD", "Further arguments of srun.")
    additional_bash_cmds: list[str] | None = setting(
        None, "Shell commands to run before the worker.", no_effect=ON_CLUSTERS
    )
    container_type: str = _slurm("apptainer", "Container runtime under Slurm.", choices=("apptainer", "none"))
    mount: str = _slurm("/storage:/storage", "Mounts of the container.")
    nodelist: str | None = _cluster(None, "Nodes to use, with commas between them; Ray knows them by their addresses.")
    exclude: str | None = _slurm(None, "Nodes not to use, with commas between them.")
    ray_placement_strategy: str = setting(
        "shared",
        "How Ray groups the workers of a role: in one placement group, or one for each engine (separate, deferred).",
        choices=("shared", "separate", "deferred"),
        no_effect=ON_RAY,
    )

    def environment(self) -> dict[str, str]:
        """``env_vars`` as a process takes them; null is an empty text."""
        return {name: "" if value is None else str(value) for name, value in self.env_vars.items()}


@dataclass
class SchedulingStrategy:
    """Whether a role has devices of its own."""

    type: str = setting(
        "separation",
        "separation gives the role its own devices; colocation shares those of the target.",
        choices=("separation", "colocation"),
    )
    target: str | None = setting(None, "Role whose devices are shared, such as actor.")
    fork: bool = setting(
        True, "With colocation: a process of its own; false shares the target's engine, in turn with it."
    )

    def problems(self) -> Problems:
        """What is wrong within the section."""
        if self.type == "colocation" and not self.target:
            yield "target", "is missing: name the role whose devices are shared, such as actor"
        if self.type == "separation":
            yield from idle(self, ("target", "fork"), "with type separation; use colocation")


def one_spec() -> list[SchedulingSpec]:
    """The default of a role: one spec, for the worker and the engine inside it."""
    return [SchedulingSpec()]


def worker_problems(specs: list[SchedulingSpec], counts: tuple[int, ...]) -> Problems:
    """What is wrong with the ``scheduling_spec`` of a role that may have so many entries."""
    if len(specs) not in counts:
        yield "scheduling_spec", f"has {len(specs)} entries; give {' or '.join(map(str, counts))}"
    for spec in specs[1:]:
        because = "in a second entry, because worker and engine are one process; write it into the first"
        yield from idle(spec, ("env_vars",), because, "scheduling_spec.1.")
