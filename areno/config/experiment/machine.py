"""Settings whose default is what the machine has: filled in once, and said once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from areno.config.experiment.allocation import ModelAllocation
from areno.config.experiment.checks import roles, same_layout, takes_turns, unshardable
from areno.config.experiment.engine_sections import AUTO, TrainEngineConfig
from areno.config.experiment.experiments import BaseExperimentConfig, PPOConfig
from areno.config.experiment.settings import settings_of, walk
from areno.config.experiment.worker_sections import SchedulingStrategy
from areno.config.parser import Problems


@dataclass(frozen=True)
class Machine:
    """What a machine has; the caller finds it out, because this package imports no torch.

    Attributes:
        gpus: CUDA devices; 0 computes on the CPU.
        cores: CPU cores that the run may use.
        flash_attention: the package flash-attn is installed.
        threads: most of a process, as ``OMP_NUM_THREADS`` asks for; None asks for nothing.
    """

    gpus: int = 0
    cores: int = 1
    flash_attention: bool = False
    threads: int | None = None

    @property
    def name(self) -> str:
        """The kind of device, for messages."""
        return "GPU" if self.gpus else "CPU"


def resolve_for_machine(config: BaseExperimentConfig, machine: Machine) -> list[str]:
    """Replace ``auto`` and unset sizes by what the machine has; the configuration is changed in place.

    Args:
        config: a checked configuration.
        machine: the machine that it is to run on.

    Returns:
        One line per setting that was filled in, to be printed once.

    Raises:
        UsageError: a setting that was given is impossible on this machine.
    """
    problems = Problems()
    lines = list(_turns(config, machine))
    needed = devices_needed(config)
    for text in _devices(config, machine, needed):
        problems.add(text)
    problems.raise_if_any()
    lines += _same_kernels(config, machine)
    for path, section, name, value in _choices(config, machine, needed):
        setattr(section, name, value)
        lines.append(f"{path}.{name} = {value} ({_reason(config, machine, name)})")
    return lines


def _reason(config: Any, machine: Machine, name: str) -> str:
    if name == "shard_weights":
        return next(unshardable(config), config.actor.backend).partition(";")[0]
    return "processes on the CPU" if name == "n_gpus_per_node" and not machine.gpus else machine.name


def devices_needed(config: BaseExperimentConfig) -> int:
    """Devices that rollout and training take together; a role that shares another one's takes none."""
    engines = [getattr(config, role, None) for role in ("rollout", "actor")]
    return sum(
        ModelAllocation.from_str(engine.backend).world_size
        for engine in engines
        if engine is not None and engine.scheduling_strategy.type == "separation"
    )


def _turns(config: BaseExperimentConfig, machine: Machine) -> Iterator[str]:
    """Let the actor's engine generate where the GPUs are too few for rollout of its own, and hold no batch ahead then."""
    if not isinstance(config, PPOConfig):
        return
    rollout, limit = config.rollout, _limit(config, machine)
    if limit and devices_needed(config) == 2 * limit and same_layout(config):
        rollout.scheduling_strategy = SchedulingStrategy(type="colocation", target="actor", fork=False)
        yield f"rollout and training take turns on {limit} GPU{'s' * (limit > 1)}, which are too few for both at once"
    if takes_turns(config) and rollout.max_head_offpolicyness:
        rollout.max_head_offpolicyness = 0
        yield "rollout.max_head_offpolicyness = 0 (rollout and training take turns)"


def _replicas(engine: TrainEngineConfig) -> int:
    return ModelAllocation.from_str(engine.backend).parallel.data


def _same_kernels(config: BaseExperimentConfig, machine: Machine) -> Iterator[str]:
    for path, entry, value in walk(config):
        if entry.name == "attn_impl" and machine.gpus and value == "sdpa":
            yield f"{path} = sdpa computes with the kernels of flash_attention_2 on a GPU"


def _is_open(section: Any, name: str) -> bool:
    """Whether a setting is left to the machine: by auto, by null, or by the default that the format documents."""
    return getattr(section, name) in (AUTO, None, settings_of(type(section))[name].info.documented)


def _limit(config: BaseExperimentConfig, machine: Machine) -> int:
    """Most GPUs that the experiment may take; 0 computes on the CPU."""
    given = None if _is_open(config.cluster, "n_gpus_per_node") else config.cluster.n_gpus_per_node
    return min(given or machine.gpus, machine.gpus)


def _devices(config: BaseExperimentConfig, machine: Machine, needed: int) -> Iterator[str]:
    cluster = config.cluster
    given = None if _is_open(cluster, "n_gpus_per_node") else cluster.n_gpus_per_node
    if machine.gpus and given == 0:
        yield (
            f"cluster.n_gpus_per_node 0 asks for no GPU, and this machine has {machine.gpus}; leave it out, or hide them "
            "with CUDA_VISIBLE_DEVICES="
        )
        return
    if machine.gpus and given is not None and given > machine.gpus:
        yield f"cluster.n_gpus_per_node {given} is more than the {machine.gpus} GPUs of this machine; leave it out"
        return
    yield from _no_place(config, machine)
    limit = _limit(config, machine)
    if limit and needed > limit:
        parts = ", ".join(
            f"{role}.backend {spec}" for role, spec in roles(config).items() if role in ("rollout", "actor")
        )
        here = f"the {machine.gpus} GPU{'s' * (machine.gpus > 1)} of this machine"
        what = f"cluster.n_gpus_per_node {given}" if given else here
        yield f"{parts} need {needed} devices, more than {what}; give smaller sizes, or the same to both, which then take turns"


def _no_place(config: BaseExperimentConfig, machine: Machine) -> Iterator[str]:
    """Settings for a GPU on a machine without one, and the other way round."""
    for path, entry, value in walk(config):
        if entry.name in ("offload", "offload_activations") and value and not machine.gpus:
            yield f"{path} true has no effect on a CPU, whose memory holds everything anyway; leave it out"
        if entry.name == "speculate" and value and machine.gpus:
            yield f"{path} {value}: on a GPU nothing is guessed ahead; use {path}=0"


def _choices(config: BaseExperimentConfig, machine: Machine, needed: int) -> Iterator[tuple[str, Any, str, Any]]:
    cluster = config.cluster
    if cluster.n_nodes != 1:
        yield "cluster", cluster, "n_nodes", 1
    actor = getattr(config, "actor", None)
    if isinstance(actor, TrainEngineConfig) and actor.fsdp.shard_weights is None and _replicas(actor) > 1:
        yield "actor.fsdp", actor.fsdp, "shard_weights", not any(unshardable(config))
    devices = machine.gpus or max(needed, 1)
    if _is_open(cluster, "n_gpus_per_node") and cluster.n_gpus_per_node != devices:
        yield "cluster", cluster, "n_gpus_per_node", devices
    on_gpu = {"dtype": "bfloat16", "attn_impl": "flash_attention_2" if machine.flash_attention else "sdpa"}
    share = max(machine.cores // max(needed, 1), 1)
    chosen = on_gpu if machine.gpus else {"dtype": "float32", "attn_impl": "sdpa"}
    for path, entry, value in walk(config):
        if entry.shape == "section" and isinstance(value, TrainEngineConfig):
            for name, choice in chosen.items():
                given = getattr(value, name)
                if given == AUTO or (given == "flash_attention_2" and not machine.gpus):
                    yield path, value, name, choice
        if entry.shape == "sections" and value and path in ("rollout.scheduling_spec", "actor.scheduling_spec"):
            for index, spec in enumerate(value):
                if spec.cpu is None:
                    yield f"{path}.{index}", spec, "cpu", min(share, machine.threads or share)
    if isinstance(config, PPOConfig):
        apart = config.rollout.scheduling_strategy.type == config.actor.scheduling_strategy.type == "separation"
        mode = config.actor.weight_update_mode
        if mode == AUTO or (mode == "xccl" and not apart):
            yield "actor", config.actor, "weight_update_mode", ("xccl" if machine.gpus and apart else "shm")
