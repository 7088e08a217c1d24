"""Checks that areno supports the backends and the parallel sizes of an experiment."""

from collections.abc import Iterator
from typing import Any

from areno.config.experiment.allocation import AllocationMode, ModelAllocation, ParallelStrategy
from areno.config.experiment.engine_sections import TrainEngineConfig
from areno.config.experiment.experiments import BaseExperimentConfig, PPOConfig
from areno.config.experiment.roles import addresses_of, roles, server_of, takes_turns
from areno.config.experiment.setting_declaration import changed
from areno.config.machine import tensor_parallel_problem
from areno.config.rollout_options import SERVERS
from areno.errors import UsageError


def backend_problems(config: BaseExperimentConfig) -> Iterator[str]:
    """Yield the problems with the backends of all roles.

    If ``allocation_mode`` is set, a single problem covers all unsupported backends, because its remedy is a new
    ``allocation_mode``.
    """
    unsupported: list[tuple[str, str, str, ModelAllocation]] = []
    for role, spec in roles(config).items():
        try:
            allocation = ModelAllocation.from_str(spec)
        except UsageError as error:
            yield f"{role}.backend {error}"
            continue
        generates = role.endswith("rollout")
        if allocation.is_inference != generates:
            does, other = ("training", "areno:d1") if generates else ("inference", "fsdp:d1")
            yield f"{role}.backend {spec} is only for {does}; use a backend such as {other}"
        elif missing := _unsupported(allocation, role):
            unsupported.append((f"{role}.backend", spec, missing, allocation))
        elif role in ("ref", "critic") and spec != roles(config)["actor"]:
            yield (
                f"{role}.backend {spec} differs from actor.backend, but {role} runs on the actor's ranks; remove "
                f"{role}.backend"
            )
        else:
            yield from _layout(config, role, allocation)
    if unsupported and config.allocation_mode:
        parts = "; ".join(dict.fromkeys(missing for _, _, missing, _ in unsupported))
        mode = AllocationMode.from_str(config.allocation_mode)
        shares = bool(mode.engines[0].name) and bool(mode.colocated())
        better = [_replacement(engine, engine.name if shares else "") for engine in mode.engines[:2]]
        remedy = f"write allocation_mode={('|' if shares else '+').join(better)}"
        yield f"allocation_mode {config.allocation_mode}: {parts}; {remedy}"
        return
    for name, spec, missing, allocation in unsupported:
        yield f"{name} {spec}: {missing}; write {name}={_replacement(allocation)}"


def _servers(config: PPOConfig) -> Iterator[str]:
    """Yield problems with settings of the rollout that do not suit ``rollout.backend``."""
    rollout, product = config.rollout, server_of(config)
    if not product:
        for name in changed(rollout, ("api_url", "provider_api_key")):
            yield (
                f"rollout.{name} is for inference servers, but rollout.backend is {rollout.backend}; set rollout.backend to "
                f"vllm:dN or sglang:dN, or remove rollout.{name}"
            )
        return
    where, replicas = f"with rollout.backend {rollout.backend}", ModelAllocation.from_str(rollout.backend).parallel.data
    if takes_turns(config):
        role = "actor" if rollout.scheduling_strategy.fork else "rollout"
        yield (
            f"{role}.scheduling_strategy.fork=false is not supported {where}: fork=false runs generation and training in the "
            f"same process, but inference servers run in their own processes; remove {role}.scheduling_strategy.fork"
        )
    if rollout.speculate:
        yield (
            f"rollout.speculate {rollout.speculate} has no effect {where}, because servers have their own options for "
            "speculative decoding; remove the setting"
        )
    if rollout.return_routed_experts:
        yield (
            f"rollout.return_routed_experts true is not supported {where}, because areno does not read expert routing from "
            "servers; remove the setting"
        )
    addresses = addresses_of(config)
    if rollout.api_url is not None and len(addresses) != replicas:
        yield (
            f"rollout.api_url: the number of addresses is {len(addresses)}, but rollout.backend {rollout.backend} needs "
            f"{replicas}, one per replica; separate addresses by commas"
        )
    elif wrong := [address for address in addresses if not address.startswith(("http://", "https://"))]:
        yield f"rollout.api_url {wrong[0]!r} is not the address of a server; write http://HOST:PORT"


def _layout(config: Any, role: str, allocation: ModelAllocation) -> Iterator[str]:
    """Yield problems with the parallel sizes of a role's backend, and with settings that conflict with this backend."""
    where, tensor, actor = f"{role}.backend {allocation.spec}", allocation.parallel.tensor, config.actor
    if role == "rollout":
        yield from _servers(config)
    if tensor > 1 and allocation.backend not in SERVERS and (problem_and_remedy := tensor_parallel_problem()):
        yield f"{where}: {problem_and_remedy}, or remove t{tensor} from {role}.backend"
    if role in ("actor", "rollout") and tensor > 1 and actor.load_in_4bit:
        yield (
            f"actor.load_in_4bit is not supported with {where}: 4-bit weights cannot be sharded; remove t{tensor} from "
            f"{role}.backend, or remove actor.load_in_4bit"
        )
    if role == "rollout" and tensor > 1 and config.rollout.speculate and not server_of(config):
        yield (
            f"rollout.speculate {config.rollout.speculate} is not supported with {where}: speculative decoding needs one rank "
            f"per replica; remove t{tensor} from rollout.backend, or remove rollout.speculate"
        )
    if role != "actor":
        return
    if actor.fsdp.shard_weights:
        yield from (f"actor.fsdp.shard_weights true is not supported {reason}" for reason in unshardable(config))
    elif allocation.parallel.context * allocation.parallel.expert_ranks > 1:
        yield from (f"{where} shards weights, which is not supported {reason}" for reason in unshardable(config))
    if allocation.backend != "fsdp":
        yield from (f"actor.{allocation.backend}.{text}" for text in getattr(actor, allocation.backend).unsupported())
    yield from _stages(config, allocation, where)


def _stages(config: Any, allocation: ModelAllocation, where: str) -> Iterator[str]:
    """Yield problems with pipeline parallelism, and with the sizes of expert parallelism."""
    parallel, actor = allocation.parallel, config.actor
    if parallel.pipeline > 1:
        for name in ("use_lora", "init_from_scratch"):
            if getattr(actor, name):
                yield (
                    f"actor.{name} is not supported with {where}: pipeline parallelism trains only full weights that are "
                    f"loaded from a checkpoint; remove p{parallel.pipeline} from actor.backend"
                )
        if isinstance(config, PPOConfig) and takes_turns(config):
            yield (
                f"rollout and training alternate, but with {where} the actor cannot generate, because its layers are on "
                "several stages; give rollout its own devices (scheduling_strategy.type=separation), or remove "
                f"p{parallel.pipeline} from actor.backend"
            )
    shards, parts = parallel.data * parallel.context, parallel.expert * parallel.expert_tensor
    if not parallel.expert_ranks or shards % parallel.expert_ranks:
        yield (
            f"{where}: for experts, expert-parallel size times tensor-parallel size is {parts}. This product must be a "
            f"multiple of {parallel.tensor} (tensor-parallel size of the other layers) and divide {shards * parallel.tensor} "
            "(devices per pipeline stage); use "
            f"{allocation.backend}:{ParallelStrategy(**{**vars(parallel), 'expert': 1, 'expert_tensor': 0}).dims}"
        )


def unshardable(config: Any) -> Iterator[str]:
    """Yield the reasons why the actor's weights cannot be sharded across its ranks (FSDP2), each with a remedy."""
    parallel = ModelAllocation.from_str(config.actor.backend).parallel
    if parallel.data * parallel.context == 1:
        yield (
            f"with actor.backend {config.actor.backend}: there is only one data-parallel rank, so no other rank "
            "could hold a part of the weights; use d2 or more, or do not shard the weights"
        )
    if parallel.tensor > 1 and (problem_and_remedy := tensor_parallel_problem(fsdp=True)):
        remedy = f"{problem_and_remedy}, or remove t{parallel.tensor} from actor.backend"
        yield f"with actor.backend {config.actor.backend}: {remedy}"
    if config.actor.load_in_4bit:
        yield "with actor.load_in_4bit: 4-bit weights cannot be sharded; remove actor.load_in_4bit, or do not shard the weights"
    if config.actor.use_lora and parallel.tensor > 1:
        yield (
            "with actor.use_lora: areno cannot shard the adapters of tensor-parallel layers with FSDP2; remove actor.use_lora, "
            f"remove tensor parallelism (t{parallel.tensor}) from actor.backend, or do not shard the weights"
        )


def sharding_requested(actor: TrainEngineConfig) -> bool:
    """Whether the settings request sharded weights for the actor. :func:`unshardable` yields what prevents sharding.

    With the backend megatron, ``use_torch_fsdp2`` or ``use_custom_fsdp`` of ``actor.megatron`` requests sharding. With any
    other backend, sharding is requested unless the actor uses LoRA or an ``optimizer.type`` other than ``adam``.
    """
    if actor.backend.startswith("megatron"):
        return bool(actor.megatron.shards_weights)
    return not actor.use_lora and (actor.optimizer is None or actor.optimizer.type == "adam")


def shards_weights(config: Any) -> bool:
    """Whether the actor's weights are sharded.

    With context or expert parallelism, weights are always sharded. Otherwise ``fsdp.shard_weights`` decides. If
    ``fsdp.shard_weights`` is null, weights are sharded if :func:`sharding_requested` is true and :func:`unshardable` yields
    no reason against it.
    """
    actor, parallel = config.actor, ModelAllocation.from_str(config.actor.backend).parallel
    if parallel.context * parallel.expert_ranks > 1:
        return True
    if actor.fsdp.shard_weights is not None:
        return bool(actor.fsdp.shard_weights)
    return sharding_requested(actor) and not any(unshardable(config))


def _unsupported(allocation: ModelAllocation, role: str) -> str:
    if allocation.backend in SERVERS and role != "rollout":
        return f"areno uses {allocation.backend} servers only for the role rollout"
    if allocation.backend == "areno" and allocation.parallel.pipeline > 1:
        return f"the backend areno does not support pipeline parallelism (p{allocation.parallel.pipeline})"
    return ""


def _replacement(allocation: ModelAllocation, name: str = "") -> str:
    """Return a backend that areno supports, such as ``fsdp:d4``, for as many devices as ``allocation`` uses."""
    tensor = allocation.parallel.tensor
    data = allocation.world_size // tensor
    backend = ("areno" if allocation.is_inference else "fsdp") + (f"[{name}]" if name else "")
    return f"{backend}:d{data}" + (f"t{tensor}" if tensor > 1 else "")
