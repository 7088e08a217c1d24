"""Settings whose default is what the machine has: filled in once, and said once."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from areno.config.experiment.allocation import ModelAllocation
from areno.config.experiment.backends import unshardable
from areno.config.experiment.engine_sections import AUTO, TrainEngineConfig
from areno.config.experiment.experiments import BaseExperimentConfig, PPOConfig
from areno.config.experiment.roles import CLUSTERS, engine_of, roles, same_layout, server_of, takes_turns
from areno.config.experiment.settings import settings_of, walk
from areno.config.experiment.worker_sections import SchedulingStrategy
from areno.config.parser import Problems

CPU_PER_GPU = 8
"""Cores of a worker on a cluster, for each GPU, unless it says something else; one without a GPU has one."""


@dataclass(frozen=True)
class Machine:
    """What a machine has; the caller finds it out, because this package imports no torch."""

    gpus: int = 0  # CUDA devices; 0 computes on the CPU
    cores: int = 1  # CPU cores that the run may use
    flash_attention: bool = False  # the package flash-attn is installed
    threads: int | None = None  # most of a process, as ``OMP_NUM_THREADS`` asks for; None asks for nothing
    nodes: int = 0  # of a cluster, whose devices and cores the others are; 0 is one machine


def resolve_for_machine(config: BaseExperimentConfig, machine: Machine) -> list[str]:
    """Replace ``auto`` and unset sizes by what the machine has; the checked configuration is changed in place.

    Returns:
        One line per setting that was filled in, to be printed once.

    Raises:
        UsageError: a setting that was given is impossible on this machine.
    """
    problems = Problems()
    lines = list(_turns(config, machine))
    for text in (*_devices(config, machine), *_no_place(config, machine)):
        problems.add(text)
    problems.raise_if_any()
    for path, entry, value in walk(config):
        if entry.name == "attn_impl" and machine.gpus and value == "sdpa":
            lines.append(f"{path} = sdpa computes with the kernels of flash_attention_2 on a GPU")
    for path, section, name, value in _choices(config, machine):
        setattr(section, name, value)
        lines.append(f"{path}.{name} = {value} ({_reason(config, machine, name)})")
    return lines


def _reason(config: Any, machine: Machine, name: str) -> str:
    if name == "shard_weights":
        why = next(unshardable(config), config.actor.backend).partition(";")[0]
        return (
            why if _shards(config.actor) else f"with {config.actor.backend} and these settings only states are sharded"
        )
    if machine.gpus:
        return "GPU"
    return "processes on the CPU" if name == "n_gpus_per_node" else "CPU"


def devices_needed(config: BaseExperimentConfig) -> int:
    """Devices that rollout and training take together; a role that shares another one's takes none."""
    engines = [getattr(config, role, None) for role in ("rollout", "actor")]
    return sum(
        ModelAllocation.from_str(engine.backend).world_size
        for engine in engines
        if engine is not None
        and engine.scheduling_strategy.type == "separation"
        and not getattr(engine, "api_url", None)
    )


def _asked(config: BaseExperimentConfig) -> int | None:
    """GPUs that the experiment asks for; None leaves them to the machine: by null, or by the documented default.

    A cluster is sized by whoever asks for it.
    """
    if config.scheduler.type in CLUSTERS:
        return None
    documented = settings_of(type(config.cluster))["n_gpus_per_node"].info.documented
    asked = config.cluster.n_gpus_per_node
    return None if asked == documented else asked


def _limit(config: BaseExperimentConfig, machine: Machine) -> int:
    """Most GPUs that the experiment may take; 0 computes on the CPU."""
    return min(_asked(config) or machine.gpus, machine.gpus)


def _turns(config: BaseExperimentConfig, machine: Machine) -> Iterator[str]:
    """Let the actor's engine generate where the GPUs are too few for rollout of its own, and hold no batch ahead then."""
    if not isinstance(config, PPOConfig):
        return
    rollout, limit = config.rollout, _limit(config, machine)
    if limit and devices_needed(config) == 2 * limit and same_layout(config) and not server_of(config):
        rollout.scheduling_strategy = SchedulingStrategy(type="colocation", target="actor", fork=False)
        yield f"rollout and training take turns on {limit} GPU{'s' * (limit > 1)}, which are too few for both at once"
    if takes_turns(config) and rollout.max_head_offpolicyness:
        rollout.max_head_offpolicyness = 0
        yield "rollout.max_head_offpolicyness = 0 (rollout and training take turns)"


def _devices(config: BaseExperimentConfig, machine: Machine) -> Iterator[str]:
    asked, needed = _asked(config), devices_needed(config)
    if not machine.gpus:
        return
    if asked == 0:
        yield (
            f"cluster.n_gpus_per_node 0 asks for no GPU, and this machine has {machine.gpus}; leave it out, or hide them "
            "with CUDA_VISIBLE_DEVICES="
        )
    elif asked is not None and asked > machine.gpus:
        yield f"cluster.n_gpus_per_node {asked} is more than the {machine.gpus} GPUs of this machine; leave it out"
    elif needed > (asked or machine.gpus):
        parts = [f"{role}.backend {spec}" for role, spec in roles(config).items() if role in ("rollout", "actor")]
        here = f"the {machine.gpus} GPU{'s' * (machine.gpus > 1)} of this machine"
        what = f"cluster.n_gpus_per_node {asked}" if asked else here
        yield (
            f"{', '.join(parts)} need {needed} devices, more than {what}; give smaller sizes, or the same to both, which "
            "then take turns"
        )


# Settings that move data to host memory.
_FOR_GPUS = ("enable_offload", "offload", "offload_activations", "offload_params", "per_layer_optim_step")


def _no_place(config: BaseExperimentConfig, machine: Machine) -> Iterator[str]:
    """Settings for a GPU on a machine without one, and the other way round."""
    for path, entry, value in walk(config):
        if entry.name in _FOR_GPUS and value and not machine.gpus:
            yield f"{path} true has no effect on a CPU, whose memory holds everything anyway; leave it out"
        if entry.name == "speculate" and value and machine.gpus:
            yield f"{path} {value}: on a GPU nothing is guessed ahead; use {path}=0"


def _shards(actor: TrainEngineConfig) -> bool:
    """Whether weights are sharded where nothing is said: where they and their states weigh most, and a backend does so."""
    if actor.backend.startswith("megatron"):
        return bool(actor.megatron.shards_weights)
    return not actor.use_lora and (actor.optimizer is None or actor.optimizer.type == "adam")


def _choices(config: BaseExperimentConfig, machine: Machine) -> Iterator[tuple[str, Any, str, Any]]:
    """What is left to the machine: path and section, name, and the value for it."""
    cluster, needed = config.cluster, max(devices_needed(config), 1)
    if cluster.n_nodes != 1 and not machine.nodes:
        yield "cluster", cluster, "n_nodes", 1
    actor = engine_of(config, "actor")
    parallel = ModelAllocation.from_str(actor.backend).parallel if actor is not None else None
    if actor is not None and parallel and actor.fsdp.shard_weights is None and parallel.data * parallel.context > 1:
        yield "actor.fsdp", actor.fsdp, "shard_weights", _shards(actor) and not any(unshardable(config))
    devices = machine.gpus or needed
    if not machine.nodes and _asked(config) is None and cluster.n_gpus_per_node != devices:
        yield "cluster", cluster, "n_gpus_per_node", devices
    on_gpu = {"dtype": "bfloat16", "attn_impl": "flash_attention_2" if machine.flash_attention else "sdpa"}
    chosen = on_gpu if machine.gpus else {"dtype": "float32", "attn_impl": "sdpa"}
    share = max(machine.cores // needed, 1)
    if machine.nodes:
        share = CPU_PER_GPU if machine.gpus else 1
    for path, _, value in walk(config):
        if isinstance(value, TrainEngineConfig):
            for name, choice in chosen.items():
                given = getattr(value, name)
                if given == AUTO or (given == "flash_attention_2" and not machine.gpus):
                    yield path, value, name, choice
        if path in ("rollout.scheduling_spec", "actor.scheduling_spec"):
            for index, spec in enumerate(value):
                if spec.cpu is None:
                    yield f"{path}.{index}", spec, "cpu", min(share, machine.threads or share)
    if isinstance(config, PPOConfig):
        apart = config.rollout.scheduling_strategy.type == config.actor.scheduling_strategy.type == "separation"
        mode = config.actor.weight_update_mode
        if mode == AUTO or (mode == "xccl" and not apart and (machine.gpus or not machine.nodes)):
            broadcast = apart if machine.gpus else machine.nodes
            if mode == AUTO and machine.gpus and server_of(config):
                broadcast = False  # a broadcast to GPUs of servers has not been tried: not without being asked for
            otherwise = "disk" if machine.nodes else "shm"  # ranks that share a GPU cannot meet in a collective
            yield "actor", config.actor, "weight_update_mode", ("xccl" if broadcast else otherwise)
