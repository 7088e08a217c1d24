"""Sections for workers: cluster, name resolution and scheduler."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from areno.config.experiment.setting_declaration import Problems, ineffective, section, setting

DEFAULT_FILEROOT = "~/.local/share/areno/"
"""Root folder of logs and checkpoints.

The folder is in the user's home, because other users could write to a shared folder such as /tmp.
"""

DEFAULT_RECORD_ROOT = "/tmp/areno/name_resolve"
_REMOTE_REWARD = "external reward services are not supported; set reward.fn=file.py:NAME or reward.path=MODEL instead"
ON_CLUSTERS = "only read if scheduler.type is ray or slurm"
ON_SLURM = "only read if scheduler.type is slurm"
ON_RAY = "only read if scheduler.type is ray"
READ_BY = {ON_CLUSTERS: ("ray", "slurm"), ON_SLURM: ("slurm",), ON_RAY: ("ray",)}
"""Maps a ``no_effect`` text to the values of ``scheduler.type`` for which settings with this text do have an effect."""

_cluster = partial(setting, no_effect=ON_CLUSTERS)
_slurm = partial(setting, no_effect=ON_SLURM)
_worker = partial(setting, no_effect="areno starts its processes itself")
_remote = partial(setting, refused=_REMOTE_REWARD)


@dataclass
class NameResolveConfig:
    """Where workers publish their addresses."""

    type: str = setting(
        "nfs",
        "Where addresses are stored: in files (nfs), an etcd server (etcd3), a Ray actor (ray) or process "
        "memory (memory).",
        choices=("nfs", "memory", "etcd3", "ray"),
    )
    nfs_record_root: str = _cluster(
        DEFAULT_RECORD_ROOT,
        "If `type` is nfs: folder for the files with the workers' addresses. All machines must share this folder.",
        documented="/tmp/areal/name_resolve",
        shown="subfolder `name_resolve` of `cluster.fileroot`",
    )
    etcd3_addr: str = _cluster("localhost:2379", "Address of an etcd server that all machines can reach.")
    ray_actor_name: str = _cluster("ray_kv_store", "Name of the Ray actor that stores the addresses.")


@dataclass
class ClusterSpecConfig:
    """The machines and the folder that they share."""

    name_resolve: NameResolveConfig = section(NameResolveConfig, "Where workers publish their addresses.")
    cluster_name: str = _worker("local", "Name of the cluster.")
    fileroot: str = setting(
        DEFAULT_FILEROOT, "Root folder of logs and checkpoints. All machines must share this folder."
    )
    n_nodes: int = setting(
        1,
        "Number of machines. Without Ray or Slurm, the value must be 1 or 32 (AReaL's default); both then mean one machine.",
        minimum=1,
        documented=32,
        shown="1",
    )
    n_gpus_per_node: int | None = setting(
        None,
        "Number of GPUs per machine, 0 for machines without GPUs. On Ray, only the value 0 has an effect. "
        "Without Ray or Slurm, 8 means all GPUs, because 8 is AReaL's default.",
        minimum=0,
        documented=8,
        shown="all GPUs of the machine (with slurm, you must set a value)",
    )


@dataclass
class SchedulerConfig:
    """The scheduler that starts worker processes."""

    type: str | None = setting(
        None,
        "Where processes start: on this machine (local or null), on a Ray cluster (ray) or on the nodes of a "
        "Slurm job (slurm).",
        choices=("local", "ray", "slurm"),
    )
    endpoint: str = _worker("http://localhost:8081", "Address of an external scheduling service.")
    deploy_mode: str = _worker(
        "separation", "How an external scheduling service assigns devices to rollout and training."
    )
    functioncall_service_domain: str = _remote("http://localhost:8080", "Address of an external reward service.")
    reward_functioncall_config: dict[str, Any] = setting(
        {}, "Settings of an external reward service.", refused=_REMOTE_REWARD
    )
    reward_model_path: str = _remote("", "Model of an external reward service.")
    reward_model_service_url: str = _remote(
        "http://localhost:30000/classify", "Address of an external reward service's classifier."
    )


@dataclass
class SchedulingSpec:
    """Resources of a role's workers."""

    cpu: int | None = setting(
        None,
        "Number of CPU cores of a worker. On a cluster, a worker with several GPUs gets this number of cores per GPU. A "
        "worker uses as many compute threads as cores.",
        minimum=1,
        shown="an equal share of this machine's CPU cores (on a cluster: 8 if the nodes have GPUs, else 1)",
    )
    gpu: int = _cluster(
        0,
        "Number of GPUs of a worker. On nodes with GPUs, 0 counts as 1. On nodes without GPUs, the value has no effect.",
        minimum=0,
    )
    mem: int = _cluster(
        32,
        "Requested memory in GB per GPU (without GPUs: per worker). The default (32) requests no specific amount, so a request "
        "for exactly 32 GB is impossible.",
        minimum=1,
    )
    port_count: int = _worker(2, "Number of ports that the worker may open.", minimum=1)
    image: str = _slurm("", "Container image. If empty, the worker runs directly on the node.")
    task_type: str = _worker("worker", "Kind of worker.", choices=("worker", "engine"))
    env_vars: dict[str, Any] = setting({}, "Environment variables of the worker.")
    cmd: str | None = _cluster(
        None,
        "Command that starts Python, such as `numactl -N0 python3`. areno adds `-m` and the name of the worker module.",
    )
    srun_additional_args: str = _slurm("--unbuffered --mpi=pmi2 -K --chdir $PWD", "Additional arguments of srun.")
    additional_bash_cmds: list[str] | None = setting(
        None, "Shell commands to run before the worker.", no_effect=ON_CLUSTERS
    )
    container_type: str = _slurm("apptainer", "Container runtime under Slurm.", choices=("apptainer", "none"))
    mount: str = _slurm("/storage:/storage", "Mounts of the container.")
    nodelist: str | None = _cluster(None, "Comma-separated nodes to use. For Ray, give the addresses of the nodes.")
    exclude: str | None = _slurm(None, "Comma-separated nodes to exclude.")
    ray_placement_strategy: str = setting(
        "shared",
        "How a role's engines share Ray placement groups. With shared, single-worker engines share one group, and every "
        "other engine gets its own. With separate or deferred, every engine gets its own group.",
        choices=("shared", "separate", "deferred"),
        no_effect=ON_RAY,
    )

    def environment(self) -> dict[str, str]:
        """Return ``env_vars`` as strings; null becomes an empty string."""
        return {name: "" if value is None else str(value) for name, value in self.env_vars.items()}


@dataclass
class SchedulingStrategy:
    """Whether a role has its own devices or shares the devices of another role."""

    type: str = setting(
        "separation",
        "Whether the role has its own devices (separation) or shares the devices of the role `target` (colocation).",
        choices=("separation", "colocation"),
    )
    target: str | None = setting(None, "Role whose devices are shared, such as actor.")
    fork: bool = setting(
        True,
        "Whether rollout and training on shared devices run in separate processes. If false, both use the actor's engine in "
        "turns. For roles other than rollout and actor, the setting has no effect.",
    )

    def problems(self) -> Problems:
        """Yield the problems with settings of this section."""
        if self.type == "colocation" and not self.target:
            yield "target", "is missing; set the role whose devices are shared, such as actor"
        if self.type == "separation":
            yield from ineffective(self, ("target", "fork"), "with type=separation; set type=colocation")


def one_spec() -> list[SchedulingSpec]:
    """Return the default of ``scheduling_spec``: a list with one entry whose settings have their default values."""
    return [SchedulingSpec()]


def worker_problems(specs: list[SchedulingSpec], counts: tuple[int, ...]) -> Problems:
    """Yield the problems with a role's ``scheduling_spec``. ``counts`` contains the allowed lengths of ``specs``."""
    if len(specs) not in counts:
        yield "scheduling_spec", f"has {len(specs)} entries; use {' or '.join(map(str, counts))}"
    for spec in specs[1:]:
        because = "in the second entry, because areno reads only the first entry; move the setting to the first entry"
        yield from ineffective(spec, ("env_vars",), because, "scheduling_spec.1.")
