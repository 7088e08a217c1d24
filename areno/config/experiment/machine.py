"""Sets the settings whose defaults depend on the machine."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from areno.config.experiment.allocation import ModelAllocation
from areno.config.experiment.backends import sharding_requested, shards_weights, unshardable
from areno.config.experiment.engine_sections import AUTO, TrainEngineConfig
from areno.config.experiment.experiments import BaseExperimentConfig, PPOConfig
from areno.config.experiment.roles import (
    CLUSTERS,
    engine_of,
    roles,
    same_layout,
    server_of,
    shares_devices,
    takes_turns,
)
from areno.config.experiment.setting_declaration import settings_of, walk
from areno.config.experiment.worker_sections import SchedulingStrategy
from areno.config.parser import Problems

CPU_PER_GPU = 8
"""Default number of CPU cores per GPU of a worker on a cluster. A worker without a GPU gets one core."""


@dataclass(frozen=True)
class Machine:
    """Resources of a machine. Detection needs torch, and is therefore in ``areno.experiments``."""

    gpus: int = 0  # CUDA devices; 0 runs on the CPU
    cores: int = 1  # usable CPU cores
    flash_attention: bool = False  # whether the package flash-attn is installed
    threads: int | None = None  # maximum threads per process (``OMP_NUM_THREADS``); None if unset
    nodes: int = 0  # nodes of a cluster, whose total GPUs and cores are given above; 0 is a single machine


def resolve_for_machine(config: BaseExperimentConfig, machine: Machine) -> list[str]:
    """In a valid configuration, replace values that depend on the machine, such as ``auto`` for a dtype.

    Returns:
        Lines for the log, such as ``actor.dtype = bfloat16 (GPU)``.

    Raises:
        UsageError: a setting is impossible on this machine.
    """
    lines = list(_alternation(config, machine))
    Problems.raise_all(
        (*_devices(config, machine), *_device_mismatch(config, machine), *_idle_offload(config, machine))
    )
    for path, entry, value in walk(config):
        if entry.name == "attn_impl" and machine.gpus and value == "sdpa":
            lines.append(f"{path} = sdpa (on a GPU, sdpa and flash_attention_2 use the same kernels)")
    for path, section, name, value in _choices(config, machine):
        setattr(section, name, value)
        lines.append(f"{path}.{name} = {value} ({_reason(config, machine, name)})")
    return lines


def _reason(config: Any, machine: Machine, name: str) -> str:
    if name == "shard_weights":
        backend = config.actor.backend
        if shards_weights(config):
            return backend
        why = next(unshardable(config), "").partition(";")[0] if sharding_requested(config.actor) else ""
        return why or f"with {backend}, only optimizer states are sharded"
    if machine.gpus:
        return "GPU"
    return "processes on the CPU" if name == "n_gpus_per_node" else "CPU"


def devices_needed(config: BaseExperimentConfig) -> int:
    """Return the number of devices that rollout and training need together.

    By default, rollout and training have separate devices, and the result is the sum. If only one of them has the
    ``scheduling_strategy`` type ``colocation``, the result is the number of devices of the other one. If both have this type,
    the result is the larger of the two numbers of devices. Rollout on servers that already run needs no device.
    """
    sizes: dict[str, list[int]] = {"separation": [], "colocation": []}
    for role in ("rollout", "actor"):
        engine = getattr(config, role, None)
        if engine is not None and not getattr(engine, "api_url", None):
            world_size = ModelAllocation.from_str(engine.backend).world_size
            sizes[engine.scheduling_strategy.type].append(world_size)
    return sum(sizes["separation"]) or max(sizes["colocation"], default=0)


def _requested_gpus(config: BaseExperimentConfig) -> int | None:
    """Return the number of GPUs that ``cluster.n_gpus_per_node`` requests; None means all GPUs.

    Null means all GPUs. So does 8, because 8 is AReaL's default. If ``scheduler.type`` is ray or slurm, the result is always
    None.
    """
    if config.scheduler.type in CLUSTERS:
        return None
    documented = settings_of(type(config.cluster))["n_gpus_per_node"].info.documented
    requested = config.cluster.n_gpus_per_node
    return None if requested == documented else requested


def _limit(config: BaseExperimentConfig, machine: Machine) -> int:
    """Return the maximum number of GPUs for the experiment; 0 means that the experiment runs on the CPU."""
    return min(_requested_gpus(config) or machine.gpus, machine.gpus)


def _alternation(config: BaseExperimentConfig, machine: Machine) -> Iterator[str]:
    """Let rollout and training alternate on the actor's engine if the GPUs suffice for only one of them at a time.

    This requires equal parallel sizes of rollout and actor, and no inference servers. If rollout and training alternate,
    ``max_head_offpolicyness`` is set to 0. Yields lines for the log.
    """
    if not isinstance(config, PPOConfig):
        return
    rollout, limit = config.rollout, _limit(config, machine)
    if limit and devices_needed(config) == 2 * limit and same_layout(config) and not server_of(config):
        rollout.scheduling_strategy = SchedulingStrategy(type="colocation", target="actor", fork=False)
        yield f"rollout and training alternate, because {limit} GPU{'s' * (limit > 1)} cannot run both at once"
    if takes_turns(config) and rollout.max_head_offpolicyness:
        rollout.max_head_offpolicyness = 0
        yield "rollout.max_head_offpolicyness = 0 (rollout and training alternate)"


def _devices(config: BaseExperimentConfig, machine: Machine) -> Iterator[str]:
    requested, needed = _requested_gpus(config), devices_needed(config)
    if not machine.gpus:
        return
    if requested == 0:
        yield (
            "cluster.n_gpus_per_node 0 requests no GPU, but this machine has GPUs; remove the setting to use the GPUs, or "
            "hide the GPUs by setting the environment variable CUDA_VISIBLE_DEVICES to an empty string"
        )
    elif requested is not None and requested > machine.gpus:
        yield (
            f"cluster.n_gpus_per_node {requested} is more than {machine.gpus}, the number of GPUs of this machine; remove the "
            "setting"
        )
    elif needed > (requested or machine.gpus):
        backends = {role: spec for role, spec in roles(config).items() if role in ("rollout", "actor")}
        parts = [f"{role}.backend {spec}" for role, spec in backends.items()]
        place = "the cluster" if machine.nodes else "this machine"
        here = f"the {machine.gpus} GPU{'s' * (machine.gpus > 1)} of {place}"
        limit = f"cluster.n_gpus_per_node {requested}" if requested else here
        alternate = (
            ", or use the same parallel sizes for rollout and actor, such as "
            f"d{requested or machine.gpus} (data-parallel size {requested or machine.gpus}), so that rollout and training "
            "alternate on the same devices"
        )
        yield (
            f"the experiment needs {needed} devices ({', '.join(parts)}), which is more than {limit}; use smaller parallel "
            f"sizes{alternate if 'rollout' in backends else ''}"
        )


# Settings that move data to host memory.
_FOR_GPUS = ("enable_offload", "offload", "offload_activations", "offload_params", "per_layer_optim_step")


def _device_mismatch(config: BaseExperimentConfig, machine: Machine) -> Iterator[str]:
    for path, entry, value in walk(config):
        if entry.name in _FOR_GPUS and value and not machine.gpus:
            yield f"{path} true has no effect on a CPU, because all data is in host memory; remove the setting"
        if entry.name == "speculate" and value and machine.gpus:
            yield f"{path} {value}: speculative decoding is not supported on GPUs; use {path}=0"


def _idle_offload(config: BaseExperimentConfig, machine: Machine) -> Iterator[str]:
    actor = engine_of(config, "actor")
    if actor is None or not machine.gpus or shards_weights(config):
        return
    sections = {"fsdp": actor.fsdp} | ({"archon": actor.archon} if actor.backend.startswith("archon") else {})
    for name, section in sections.items():
        if section.offload_params:
            yield (
                f"actor.{name}.offload_params true has no effect with actor.backend {actor.backend}, because the weights are "
                "not sharded in this run; remove the setting, or set actor.fsdp.shard_weights and use at least two "
                "data-parallel ranks (such as fsdp:d2)"
            )


def _choices(config: BaseExperimentConfig, machine: Machine) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield the settings to change for the machine, as tuples (section path, section object, setting name, new value)."""
    cluster, needed = config.cluster, max(devices_needed(config), 1)
    if cluster.n_nodes != 1 and not machine.nodes:
        yield "cluster", cluster, "n_nodes", 1
    actor = engine_of(config, "actor")
    parallel = ModelAllocation.from_str(actor.backend).parallel if actor is not None else None
    if actor is not None and parallel and actor.fsdp.shard_weights is None and parallel.data * parallel.context > 1:
        yield "actor.fsdp", actor.fsdp, "shard_weights", shards_weights(config)
    devices = machine.gpus or needed
    if not machine.nodes and _requested_gpus(config) is None and cluster.n_gpus_per_node != devices:
        yield "cluster", cluster, "n_gpus_per_node", devices
    on_gpu = {"dtype": "bfloat16", "attn_impl": "flash_attention_2" if machine.flash_attention else "sdpa"}
    defaults = on_gpu if machine.gpus else {"dtype": "float32", "attn_impl": "sdpa"}
    share = max(machine.cores // needed, 1)
    if machine.nodes:
        share = CPU_PER_GPU if machine.gpus else 1
    for path, _, value in walk(config):
        if isinstance(value, TrainEngineConfig):
            for name, default in defaults.items():
                current = getattr(value, name)
                if current == AUTO or (current == "flash_attention_2" and not machine.gpus):
                    yield path, value, name, default
        if path in ("rollout.scheduling_spec", "actor.scheduling_spec"):
            for index, spec in enumerate(value):
                if spec.cpu is None:
                    yield f"{path}.{index}", spec, "cpu", min(share, machine.threads or share)
    if isinstance(config, PPOConfig):
        apart = not shares_devices(config)
        mode = config.actor.weight_update_mode
        if mode == AUTO or (mode == "xccl" and not apart and (machine.gpus or not machine.nodes)):
            broadcast = apart if machine.gpus else machine.nodes
            if mode == AUTO and machine.gpus and server_of(config):
                broadcast = False  # sending weights to GPU servers by xccl is untested, so only on request
            otherwise = "disk" if machine.nodes else "shm"  # NCCL does not support ranks that share a GPU
            yield "actor", config.actor, "weight_update_mode", ("xccl" if broadcast else otherwise)
