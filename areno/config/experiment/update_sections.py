"""Sections of an optimizer step: optimizer, micro-batches, normalisation, rejection, sharding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from areno.config.experiment.settings import section, setting

NO_OFFLOAD = (
    "moving whole models to host memory is not supported; remove it, and use gradient_checkpointing, offload_activations or "
    "optimizer.offload"
)
"""Why engines cannot be moved out of device memory."""

_fp16 = partial(setting, no_effect="read by fp16 training only; bfloat16 and float32 have no loss scale")
_BY_LAYER = "decoder layers are wrapped one by one; remove it"


@dataclass
class OptimizerConfig:
    """Optimizer, learning-rate schedule and gradient clipping."""

    type: str = setting(
        "adam",
        choices=("adam", "sgd", "adam_8bit", "adam_bf16"),
        help="adam is AdamW with fp32 moments; adam_8bit keeps moments in 8 bits; adam_bf16 keeps them in bf16 with Kahan "
        "summation; sgd has none.",
        refused_values={
            "adam_bf16": "moments in bf16 are not supported; write type=adam, whose moments are in fp32",
        },
    )
    lr: float = setting(0.001, above=0, help="Peak learning rate.")
    weight_decay: float = setting(0.01, minimum=0, help="Decoupled weight decay.")
    beta1: float = setting(0.9, minimum=0, below=1, help="Decay of the first moment; adam and adam_bf16.")
    beta2: float = setting(0.999, minimum=0, below=1, help="Decay of the second moment; adam and adam_bf16.")
    eps: float = setting(1e-08, above=0, help="Added to the root of the second moment; adam and adam_bf16.")
    min_lr_ratio: float = setting(
        0.0, minimum=0, maximum=1, help="Where a linear or cosine schedule ends, as a share of lr."
    )
    lr_scheduler_type: str = setting(
        "constant", choices=("linear", "cosine", "constant"), help="Shape of the schedule after warm-up."
    )
    warmup_steps_proportion: float = setting(
        0.001, minimum=0, maximum=1, help="Share of all steps in which the rate rises linearly from 0 to lr."
    )
    initial_loss_scale: float = _fp16(float(2**32), above=0, help="First loss scale of fp16 training.")
    min_loss_scale: float = _fp16(1.0, above=0, help="Least loss scale of fp16 training.")
    loss_scale_window: float = _fp16(5.0, above=0, help="Steps without overflow before the fp16 loss scale grows.")
    hysteresis: int = _fp16(2, minimum=1, help="Overflows before the fp16 loss scale shrinks.")
    gradient_clipping: float = setting(1.0, above=0, help="Gradients are scaled down to at most this global norm.")
    offload: bool = setting(
        False, help="GPU only: keep optimizer states and summed gradients in host memory, and update there."
    )


@dataclass
class MicroBatchSpec:
    """How the rows of an optimizer step are cut into forward and backward passes; results do not depend on it."""

    n_mbs: int | None = setting(
        1, minimum=1, help="Number of micro-batches per device; the least number when max_tokens_per_mb is set."
    )
    granularity: int = setting(1, minimum=1, help="Adjacent rows that always stay in one micro-batch, such as pairs.")
    max_tokens_per_mb: int | None = setting(
        None, minimum=1, help="Most tokens of a micro-batch. Set it to what fits into memory; longer rows stand alone."
    )
    n_mbs_divisor: int = setting(1, minimum=1, help="The number of micro-batches becomes a multiple of this.")
    packing_algorithm: str = setting(
        "ffd",
        choices=("ffd", "kk"),
        help="ffd (first fit, longest first) makes few micro-batches; kk (Karmarkar-Karp) makes equally heavy ones.",
    )

    def new(self, **changes: Any) -> MicroBatchSpec:
        """Return a copy with some values changed."""
        return replace(self, **changes)


@dataclass
class NormConfig:
    """Normalisation (x - mean) / (std + eps) of rewards or advantages."""

    mean_level: str | None = setting(
        "batch", choices=("batch", "group"), help="Over what the mean is taken; null subtracts nothing."
    )
    mean_leave1out: bool = setting(False, help="Compare each value with the mean of the others (leave-one-out).")
    std_level: str | None = setting(
        "batch", choices=("batch", "group"), help="Over what the standard deviation is taken; null divides by nothing."
    )
    std_unbiased: bool = setting(True, help="Divide the squared deviations by n - 1 instead of n.")
    eps: float = setting(1e-05, minimum=0, help="Added to the standard deviation.")
    group_size: int = setting(
        1,
        minimum=1,
        inherits="gconfig.n_samples",
        shown="gconfig.n_samples",
        help="Consecutive rows of a group: the answers to one prompt.",
    )


@dataclass
class FSDPWrapPolicy:
    """Which modules are sharded together."""

    transformer_layer_cls_to_wrap: list[str] | None = setting(
        None,
        help="Class names of the layers; null takes the decoder layers that transformers names.",
        refused=_BY_LAYER,
    )


@dataclass
class FSDPEngineConfig:
    """Settings of the ``fsdp`` training backend."""

    shard_weights: bool | None = setting(
        None,
        shown="true for fp32 AdamW on d2 or more, without t and LoRA",
        help="Shard weights and gradients across the d replicas (FSDP2); false shards the optimizer's state only (ZeRO-1).",
    )
    wrap_policy: FSDPWrapPolicy | None = section(None, help="Which modules are sharded together.", refused=_BY_LAYER)
    offload_params: bool = setting(False, help="Keep parameters in host memory between uses.", refused=NO_OFFLOAD)
    memory_efficient_load: bool = setting(
        False,
        help="Read weights on rank 0 only and send them to the others, instead of once per rank.",
        refused="each rank reads the weights itself; remove it",
    )
    per_layer_optim_step: bool = setting(
        False,
        help="Keep optimizer state in host memory and step layer by layer on the GPU.",
        refused="states do not travel layer by layer; write optimizer.offload=true instead",
    )
    optim_step_prefetch_layers: int = setting(
        1,
        minimum=0,
        help="Layers whose optimizer state is fetched ahead with per_layer_optim_step.",
        no_effect="read with per_layer_optim_step only",
    )
    shard_vision_across_sp: bool = setting(
        False,
        help="Spread the images of a vision model over the context ranks.",
        refused="vision models are not supported; remove it",
    )
