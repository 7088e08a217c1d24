"""Opens the engines that configuration sections describe.

Also converts configuration sections to option objects for engines, optimizers, microbatches and inference servers.
"""

import importlib.util
import math
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from areno.config.experiment.allocation import ModelAllocation
from areno.config.experiment.backend_sections import Stages
from areno.config.experiment.engine_sections import TrainEngineConfig
from areno.config.experiment.experiments import BaseExperimentConfig, PPOConfig
from areno.config.experiment.machine import Machine
from areno.config.experiment.optimization_sections import MicroBatchSpec
from areno.config.experiment.optimization_sections import OptimizerConfig as OptimizerSection
from areno.config.experiment.path_checks import family_problem
from areno.config.experiment.roles import addresses_of, server_of, shares_devices
from areno.config.experiment.server_arguments import server_arguments
from areno.config.experiment.setting_declaration import walk
from areno.config.paths import base_of
from areno.config.train_options import ALL_LINEAR
from areno.cores import openmp_threads, usable_cores
from areno.engine.backend import Backend
from areno.engine.engine_config import EngineConfig
from areno.engine.model.adapter import AdapterOptions
from areno.engine.parallel.group import open_engine
from areno.engine.parallel.layout import Layout
from areno.engine.parallel.workers import STALL_S, Processes
from areno.engine.train.loss_scale import LossScale
from areno.engine.train.microbatch import MicroBatching
from areno.engine.train.optimizer import OptimizerOptions
from areno.engine.train.schedule import LrSchedule
from areno.errors import UsageError
from areno.experiments.cluster import cluster_machine
from areno.gpus import visible_gpus
from areno.launch.launcher import Launcher
from areno.rollouts.servers.command_line import ServerOptions, command_of, context_length_of

_ROWS_PER_PASS = 8


def family_problems(config: BaseExperimentConfig) -> Iterator[str]:
    """Yield an error message for each configured Hugging Face Hub model whose type differs from the setting ``model_type``.

    For each model without a problem, yield an empty string, which :meth:`areno.config.parser.Problems.raise_all` ignores.
    Only the configurations of the models are downloaded.
    """
    for path, _, section in walk(config):
        if (
            isinstance(section, TrainEngineConfig)
            and section.model_type
            and not Path(section.path).expanduser().exists()
        ):
            with suppress(OSError):  # reported when the model is loaded
                model_config, _ = PretrainedConfig.get_config_dict(section.path)
                yield family_problem(section, path, model_config.get("model_type", section.model_type))


def training_layout(actor: TrainEngineConfig) -> Layout:
    """Return the layout of the actor's engine.

    Raises:
        UsageError: the layers cannot be divided among the pipeline stages.
    """
    allocation = ModelAllocation.from_str(actor.backend, "actor")
    parallel = allocation.parallel
    wrapped = actor.fsdp.wrap_policy.transformer_layer_cls_to_wrap if actor.fsdp.wrap_policy is not None else None
    layout = Layout(
        parallel.data,
        parallel.tensor,
        bool(actor.fsdp.shard_weights),
        parallel.context,
        parallel.expert_ranks,
        parallel.pipeline,
        units=tuple(wrapped or ()),
        offloads=actor.offload
        or actor.fsdp.offload_params
        or (allocation.backend == "archon" and actor.archon.offload_params),
        # With tensor parallelism, each rank reads only its own shards.
        reads_once=actor.fsdp.memory_efficient_load and parallel.tensor == 1,
    )
    if allocation.backend == "fsdp":
        return layout
    section: Any = getattr(actor, allocation.backend)
    layout = replace(layout, reshards=section.reshards(parallel.pipeline))
    return _with_stages(layout, section.stages, actor) if parallel.pipeline > 1 else layout


def _with_stages(layout: Layout, stages: Stages, actor: TrainEngineConfig) -> Layout:
    from areno.engine.parallel.fsdp import REDUCES_UNUSED  # slow import (1 s), rarely needed

    config: Any = AutoConfig.from_pretrained(base_of(actor.path))
    layers, size = int(config.get_text_config().num_hidden_layers), layout.pp_size
    many = not layout.fsdp or REDUCES_UNUSED  # otherwise FSDP supports only one chunk per stage
    chunks = stages.runs or (2 if stages.interleaved and layers >= 2 * size and many else 1)
    if stages.layers_per_run is not None:
        total = -(-(layers + sum(stages.less)) // stages.layers_per_run)
        if total % size:
            raise UsageError(
                f"actor.archon.pp_layers_per_stage={stages.layers_per_run} divides the {layers} layers of {actor.path} into "
                f"{total} chunks, but {total} chunks cannot be divided equally among the {size} pipeline stages; "
                f"set actor.archon.pp_layers_per_stage={-(-(layers + sum(stages.less)) // (chunks * size))}"
            )
        chunks = total // size
    if layers < chunks * size:
        raise UsageError(
            f"actor.backend {actor.backend}: the {layers} layers of {actor.path} are too few for {size} stages of {chunks} "
            f"chunks each; use fewer stages or chunks"
        )
    return replace(layout, pp_chunks=chunks, pp_less=stages.less)


def this_machine() -> Machine:
    """Return the resources of this machine that are available to this process."""
    has_flash_attention = importlib.util.find_spec("flash_attn") is not None
    return Machine(visible_gpus(), usable_cores(), has_flash_attention, openmp_threads())


def machine_of(config: BaseExperimentConfig) -> Machine:
    """Return the resources of the experiment's cluster or, without a cluster, of this machine."""
    return cluster_machine(config) or this_machine()


def engine_config(
    section: TrainEngineConfig, *, trains: Any = "policy", seed: int = 0, gpu: bool | None = None, **more: Any
) -> EngineConfig:
    """Return the engine configuration for the model of a section. All ``auto`` values of the section must be resolved.

    ``gpu`` is whether to use a GPU. If ``gpu`` is None, the engine uses a GPU if this machine has one.
    """
    adapter = None
    if section.use_lora:
        adapter = AdapterOptions(
            rank=section.lora_rank,
            alpha=float(section.lora_alpha),
            target_modules=ALL_LINEAR
            if section.target_modules in ([], [ALL_LINEAR])
            else tuple(section.target_modules),
            load_in_4bit=section.load_in_4bit,
            seed=seed,
        )
    return EngineConfig(
        device=torch.device("cuda" if (torch.cuda.is_available() if gpu is None else gpu) else "cpu"),
        dtype=getattr(torch, section.dtype),
        trains=trains,
        optimizer=optimizer_of(section),
        adapter=adapter,
        attn_backend="native" if section.attn_impl == "eager" else "flash",
        activation_checkpointing=section.gradient_checkpointing,
        tree_training=section.enable_tree_training,
        offload_activations=section.offload_activations,
        random_path=section.path if section.init_from_scratch else None,
        random_seed=seed,
        deterministic=_deterministic(section),
        use_kernels=section.use_kernels,
        **{"decode": "eager", **more},  # engines that generate override this
    )


def _deterministic(section: TrainEngineConfig) -> bool:
    backend = ModelAllocation.from_str(section.backend).backend if section.backend else ""
    return backend in ("archon", "megatron") and getattr(section, backend).use_deterministic_algorithms


def optimizer_of(section: TrainEngineConfig) -> OptimizerOptions:
    """Return the optimizer options of a section, without the learning-rate schedule, which :func:`schedule_of` returns."""
    if section.optimizer is None:
        return OptimizerOptions()
    config, loss_scale = section.optimizer, None
    if section.dtype == "float16":
        loss_scale = LossScale(
            config.initial_loss_scale, config.min_loss_scale, max(round(config.loss_scale_window), 1), config.hysteresis
        )
    return OptimizerOptions(
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        grad_clip_norm=config.gradient_clipping,
        sgd=config.type == "sgd",
        adam_8bit=config.type == "adam_8bit",
        adam_bf16=config.type == "adam_bf16" or (config.type == "adam" and section.optimizer_dtype == "bfloat16"),
        offload=config.offload or section.offload or section.fsdp.per_layer_optim_step,
        loss_scale=loss_scale,
        reduce_bf16=section.grad_reduce_dtype == "bfloat16",
    )


def schedule_of(section: OptimizerSection, total_steps: int) -> LrSchedule:
    """Return the schedule of the learning rate. All minibatches of a training step have the same learning rate."""
    style: Any = section.lr_scheduler_type
    return LrSchedule(
        lr=section.lr,
        min_lr=section.lr * section.min_lr_ratio,
        warmup_steps=int(section.warmup_steps_proportion * total_steps),
        decay_steps=total_steps,
        style=style,
    )


def micro_batching(spec: MicroBatchSpec, together: int = 1, tree: bool = False) -> MicroBatching:
    """Return the microbatching options.

    Rows that belong together, such as the two rows of a pair, stay in one microbatch: the rows are divided into blocks of
    ``together`` adjacent rows, and no block is split. With ``tree``, a common prefix of several rows is computed only once.
    """
    algorithm: Any = spec.packing_algorithm
    return MicroBatching(
        n_mbs=spec.n_mbs,
        granularity=math.lcm(spec.granularity, together),
        max_tokens_per_mb=spec.max_tokens_per_mb,
        n_mbs_divisor=spec.n_mbs_divisor,
        packing_algorithm=algorithm,
        tree=tree,
    )


def rows_at_once(spec: MicroBatchSpec, longest: int) -> int:
    """Return the maximum number of rows in one scoring pass. Each row has at most ``longest`` tokens.

    If ``max_tokens_per_mb`` is set, it limits the total number of tokens of the rows. Otherwise, the result is 8.
    """
    return max(spec.max_tokens_per_mb // longest, 1) if spec.max_tokens_per_mb and longest else _ROWS_PER_PASS


def make_engine(
    section: TrainEngineConfig, config: EngineConfig, layout: Layout, launcher: Launcher | None = None
) -> Backend:
    """Open the engine of the model that ``section`` configures, in this process or in separate processes."""
    threads = section.scheduling_spec[0].cpu
    processes = Processes(
        startup_s=section.setup_timeout,
        stall_option="actor.request_timeout",
        threads=threads,
        launcher=launcher,
        role="actor",
    )
    return open_engine(section.path, config, layout, None, section.request_timeout, processes)


def replica_stall_limit(request_timeout: float) -> float:
    """Return the seconds without progress after which a rollout replica with several ranks counts as stuck.

    The result is a sixth of ``request_timeout``, but at least 600 seconds. If ``request_timeout`` is below 600 seconds, the
    result is ``request_timeout``. The result is only a fraction of the timeout, because the timeout includes the time during
    which a request waits for other requests.
    """
    return max(min(STALL_S, request_timeout), request_timeout / 6)


def server_options(config: PPOConfig, gpu: bool) -> ServerOptions | None:
    """Return the options of the inference servers; None if areno's own engine generates.

    Raises:
        UsageError: the server software is missing.
    """
    product: Any = server_of(config)
    if not product:
        return None
    rollout, actor = config.rollout, config.actor
    parallel = ModelAllocation.from_str(rollout.backend).parallel
    arguments = server_arguments(
        getattr(config, product),
        dtype=actor.dtype,
        context_length=context_length_of(actor.path),
        gpu=gpu,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        adapter_rank=actor.lora_rank if actor.use_lora else None,
    )
    options = ServerOptions(
        product=product,
        arguments=tuple(arguments),
        command=tuple(shlex.split(getattr(config, product).command)),
        addresses=addresses_of(config),
        api_key=rollout.provider_api_key or "",
        adapter=(config.gconfig.lora_name or "adapter") if actor.use_lora else "",
        gpu=gpu,
        request_timeout_s=rollout.request_timeout,
    )
    if not options.addresses:
        command_of(options)
    return options


def rollout_devices(config: PPOConfig, gpus: int) -> list[torch.device] | None:
    """Return the device of each rollout rank; None on a CPU.

    Colocated rollout ranks use the actor's devices. Otherwise, rollout ranks use the devices after the actor's devices.
    """
    if not gpus:
        return None
    first = 0 if shares_devices(config) else ModelAllocation.from_str(config.actor.backend).world_size
    ranks = ModelAllocation.from_str(config.rollout.backend).world_size
    return [torch.device("cuda", (first + rank) % gpus) for rank in range(ranks)]
