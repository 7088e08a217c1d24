"""Determines the resources of an experiment's workers, and creates the launcher that starts the workers on Ray or Slurm."""

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from areno.config.experiment.allocation import ModelAllocation
from areno.config.experiment.experiments import BaseExperimentConfig, PPOConfig
from areno.config.experiment.machine import CPU_PER_GPU, Machine
from areno.config.experiment.roles import CLUSTERS, server_of, shares_devices, takes_turns
from areno.config.experiment.setting_declaration import settings_of
from areno.config.experiment.worker_sections import NameResolveConfig, SchedulingSpec
from areno.errors import UsageError
from areno.experiments.folders import ExperimentFolders
from areno.launch import ray_cluster, slurm_steps
from areno.launch.launcher import Launcher, Names, RoleNeed
from areno.name_resolve import NameOptions
from areno.name_resolve.ray_store import connect

_NODES_MEMORY_GB = SchedulingSpec().mem


def cluster_machine(config: BaseExperimentConfig) -> Machine | None:
    """Return the resources of the cluster that ``scheduler.type`` selects; None for an experiment on one machine.

    Raises:
        UsageError: there is no cluster, or the cluster has fewer nodes than ``cluster.n_nodes``.
    """
    kind, cluster = config.scheduler.type, config.cluster
    if kind not in CLUSTERS:
        return None
    nodes: int
    if kind == "ray":
        connect("scheduler.type=ray")
        resources = ray_cluster.nodes().values()
        nodes, cores = len(resources), int(sum(node.get("CPU", 0) for node in resources))
        gpus = int(sum(node.get("GPU", 0) for node in resources))
        if cluster.n_gpus_per_node == 0:
            gpus = 0
    else:
        nodes, cores = slurm_steps.size()
        gpus = nodes * (cluster.n_gpus_per_node or 0)
    if nodes < cluster.n_nodes:
        raise UsageError(
            f"cluster.n_nodes is {cluster.n_nodes}, but the {kind} cluster has only {nodes} node{'s' * (nodes != 1)}; lower "
            "cluster.n_nodes, or add nodes"
        )
    return Machine(gpus=gpus, cores=cores, flash_attention=False, threads=None, nodes=nodes)


def open_launcher(config: BaseExperimentConfig, machine: Machine) -> Launcher | None:
    """Return the launcher for the workers of an experiment; None for an experiment on one machine.

    ``config`` must already be resolved by :func:`areno.config.experiment.machine.resolve_for_machine`. The caller must
    close the launcher.

    Raises:
        UsageError: the cluster has too few resources for the roles.
    """
    if not machine.nodes:
        return None
    needs = needs_of(config, gpus=machine.gpus > 0)
    names = Names(name_options(config), f"areno/{_trial(config)}/{uuid.uuid4().hex}")
    if config.scheduler.type == "ray":
        return ray_cluster.RayLauncher(needs, names)
    return slurm_steps.SlurmLauncher(needs, names, config.cluster.n_gpus_per_node or 0)


def needs_of(config: Any, *, gpus: bool) -> dict[str, RoleNeed]:
    """Return the resources of the actor's workers and, if the rollout has its own processes, of the rollout workers."""
    actor = ModelAllocation.from_str(config.actor.backend, "actor").parallel
    needs = {"actor": _need(config.actor.scheduling_spec[0], actor.world_size, actor.tensor, gpus)}
    if isinstance(config, PPOConfig) and not takes_turns(config) and not config.rollout.api_url:
        parallel = ModelAllocation.from_str(config.rollout.backend, "rollout").parallel
        together = parallel.tensor * parallel.pipeline
        spec = config.rollout.scheduling_spec[0]
        if server_of(config):  # an inference server is one process with the devices of all its ranks
            need = _need(spec, parallel.data, 1, gpus)
            need = replace(need, cpu=need.cpu * together, gpu=need.gpu * together)
        else:
            need = _need(spec, parallel.data * together, together, gpus)
        fits = need.workers * need.span(needs["actor"]) <= actor.world_size
        needs["rollout"] = replace(need, beside="actor") if shares_devices(config) and fits else need
    return needs


def _need(spec: SchedulingSpec, workers: int, together: int, gpus: bool) -> RoleNeed:
    gpu = (spec.gpu or 1) if gpus else 0
    return RoleNeed(
        workers=workers,
        together=together,
        cpu=(spec.cpu or (CPU_PER_GPU if gpu else 1)) * max(gpu, 1),
        gpu=gpu,
        mem=None if spec.mem == _NODES_MEMORY_GB else spec.mem,
        env_vars=spec.environment(),
        cmd=spec.cmd,
        additional_bash_cmds=tuple(spec.additional_bash_cmds or ()),
        image=spec.image,
        container_type=spec.container_type,
        mount=spec.mount,
        nodelist=spec.nodelist,
        exclude=spec.exclude,
        srun_additional_args=spec.srun_additional_args,
        ray_placement_strategy=spec.ray_placement_strategy,
    )


def name_options(config: BaseExperimentConfig) -> NameOptions:
    """Return the options of the name service (:mod:`areno.name_resolve`).

    By default, the files of the name service are below ``cluster.fileroot``.
    """
    section = config.cluster.name_resolve
    root, entry = section.nfs_record_root, settings_of(NameResolveConfig)["nfs_record_root"]
    if root in (entry.default, entry.info.documented):  # the default is local to one machine
        root = str(Path(config.cluster.fileroot).expanduser().resolve() / "name_resolve")
    return NameOptions(section.type, root, section.etcd3_addr, section.ray_actor_name)


def _trial(config: BaseExperimentConfig) -> str:
    folders = ExperimentFolders.of(config)
    return "/".join(part.replace("/", "-") for part in (folders.user, folders.experiment, folders.trial))
