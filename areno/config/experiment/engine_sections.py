"""Sections of models that are trained or that score, and of an optimizer step: actor, critic, reference, teacher."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from areno.config.experiment.foreign_sections import ArchonEngineConfig, MegatronEngineConfig
from areno.config.experiment.generation_sections import (
    ADMIN_KEY,
    NO_GATEWAY,
    InferenceEngineConfig,
    loading_timeout,
    of_gateway,
)
from areno.config.experiment.settings import section, setting
from areno.config.experiment.worker_sections import SchedulingSpec, SchedulingStrategy, one_spec
from areno.config.policy_loss_options import PolicyLossOptions, RejectionSamplingConfig
from areno.config.update_options import KL_TYPES

NO_OFFLOAD = (
    "moving whole models to host memory is not supported; remove it, and use gradient_checkpointing, offload_activations or "
    "optimizer.offload"
)
"""Why engines cannot be moved out of device memory."""

_fp16 = partial(setting, no_effect="read by fp16 training only; bfloat16 and float32 have no loss scale")
_BY_LAYER = "decoder layers are wrapped one by one; remove it"

AUTO = "auto"
"""Value of a setting that takes what the machine has."""

DTYPES = (AUTO, "float32", "bfloat16")
"""Number formats that areno computes in."""

DTYPE_SYNONYMS = {"fp32": "float32", "bf16": "bfloat16"}
"""Short names of number formats."""

ATTENTION = (AUTO, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Attention by name; a kernel of the Hugging Face hub is given as ``owner/repo[@revision][:entry]``."""


ATTENTION_HERE = (AUTO, "sdpa", "eager", "flash_attention_2")
"""Those that areno has: PyTorch's fused kernels, or (eager) every score written out."""


@dataclass
class OptimizerConfig:
    """Optimizer, learning-rate schedule and gradient clipping."""

    type: str = setting(
        "adam",
        choices=("adam", "sgd", "adam_8bit", "adam_bf16"),
        help="adam is AdamW with fp32 moments; adam_8bit keeps moments in 8 bits; adam_bf16 keeps them in bf16 with Kahan "
        "summation; sgd has none.",
        refused_values={"adam_bf16": "moments in bf16 are not supported; write type=adam, whose moments are in fp32"},
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


@dataclass
class TrainEngineConfig:
    """A model, how it is trained and on which devices."""

    experiment_name: str = setting("", inherits="experiment_name", help="Written once, at the top.")
    trial_name: str = setting("", inherits="trial_name", help="Written once, at the top.")
    path: str = setting(
        "", inherits="actor.path", required=True, help="Model folder or repo id; ref and critic start from the actor's."
    )
    model_type: str = setting("", help="Model family, such as qwen3; a checkpoint of another one is refused.")
    attn_impl: str = setting(
        AUTO,
        inherits="actor.attn_impl",
        documented="flash_attention_2",
        shown="auto (GPU: flash_attention_2 if installed; CPU: sdpa)",
        help="Attention: eager, sdpa, flash_attention_2, flash_attention_3, flex_attention, or a kernel of the hub as "
        "owner/repo[@revision][:entry].",
    )
    use_kernels: bool = setting(
        False,
        help="Replace layers by kernels of the Hugging Face hub.",
        refused="kernels of the hub in place of layers are not supported; remove it",
    )
    init_from_scratch: bool = setting(False, help="Start from random weights of the model's shape.")
    is_critic: bool = setting(False, help="The model gives one number per token (critic, reward model), not a policy.")
    temperature: float = setting(
        1.0,
        above=0,
        inherits="gconfig.temperature",
        shown="gconfig.temperature, else 1.0",
        help="Logits are divided by it before log-probs are taken.",
    )
    mb_spec: MicroBatchSpec = section(MicroBatchSpec, help="How a step is cut into micro-batches.")
    pad_to_maximum: bool = setting(
        False,
        help="Pad every micro-batch to max_tokens_per_mb.",
        no_effect="micro-batches are packed, which needs no padding",
    )
    disable_dropout: bool = setting(
        False,
        help="Train without dropout. areno always does: rollout never drops, and ratios would be noise.",
        no_effect="training never drops, because rollout does not",
    )
    gradient_checkpointing: bool = setting(False, help="Compute activations again in the backward pass to save memory.")
    offload_activations: bool = setting(
        False, help="GPU only: keep the inputs of recomputed layers in host memory until the backward pass."
    )
    dtype: str = setting(
        AUTO,
        choices=DTYPES,
        synonyms=DTYPE_SYNONYMS,
        inherits="actor.dtype",
        documented="bfloat16",
        shown="auto (GPU: bfloat16, CPU: float32)",
        help="Number format of forward and backward passes.",
    )
    grad_reduce_dtype: str = setting(
        "float32",
        choices=DTYPES[1:],
        synonyms=DTYPE_SYNONYMS,
        help="Number format in which gradients are added up across ranks.",
        refused="gradients are added up in float32 only; remove it",
    )
    optimizer_dtype: str = setting(
        "float32",
        choices=DTYPES[1:],
        synonyms=DTYPE_SYNONYMS,
        help="Number format of master weights and optimizer state.",
        refused="master weights and moments are float32 only; remove it",
    )
    optimizer: OptimizerConfig | None = section(None, help="How the model is trained; null trains nothing.")
    weight_update_mode: str = setting(
        AUTO,
        choices=(AUTO, "shm", "disk", "xccl"),
        documented="xccl",
        shown="auto (GPU: xccl, CPU: shm)",
        help="How new weights reach rollout: shm by shared memory, xccl by a collective, disk by a checkpoint.",
    )
    fsdp: FSDPEngineConfig = section(FSDPEngineConfig, help="Settings of the backend fsdp.")
    archon: ArchonEngineConfig = section(ArchonEngineConfig, help="Settings of the backend archon.")
    megatron: MegatronEngineConfig = section(MegatronEngineConfig, help="Settings of the backend megatron.")
    offload: bool = setting(
        False, help="Move model and optimizer to host memory while others compute.", refused=NO_OFFLOAD
    )
    use_lora: bool = setting(False, help="Train an adapter beside frozen weights.")
    lora_rank: int = setting(32, minimum=1, help="Rank of the adapter.")
    lora_alpha: int = setting(16, minimum=1, help="The adapter's output is scaled by alpha / rank.")
    target_modules: list[str] = setting(
        [], shown="all linear layers", help="Linear layers that get an adapter, by the end of their name."
    )
    load_in_4bit: bool = setting(
        False, help="Hold the frozen weights in 4 bits (QLoRA: nf4, double quantisation, by bitsandbytes)."
    )
    peft_type: str = setting("lora", choices=("lora",), help="Kind of adapter.")
    enable_tree_training: bool = setting(False, help="Compute shared prefixes of a micro-batch's rows once.")
    scheduling_spec: list[SchedulingSpec] = section(one_spec, help="What a worker of this model needs; one or two.")
    backend: str = setting(
        "", inherits="actor.backend", required=True, help="Engine and parallelism, such as fsdp:d2 or fsdp:d2t2."
    )
    _version: str = setting(
        "v1", choices=("v1", "v2"), help="v2 runs training as services behind a gateway.", refused=NO_GATEWAY
    )
    admin_api_key: str = of_gateway("", shown=ADMIN_KEY, help="Key of the services of v2.")
    log_level: str = of_gateway("warning", help="Log level of the services of v2.")
    request_timeout: float = setting(
        3600.0,
        above=0,
        help="With several ranks: the run ends when one of them has made no progress for so many seconds.",
    )
    setup_timeout: float = setting(3600.0, above=0, help="Seconds that a worker may take to load its model.")
    workers_ready_timeout: float = loading_timeout(
        30.0, above=0, help="Seconds that a worker process may take to answer."
    )
    scheduling_strategy: SchedulingStrategy = section(SchedulingStrategy, help="Whether the role has its own devices.")


@dataclass
class NamedAlgorithm:
    """An algorithm in place of the loss of a section."""

    algorithm: str = setting(
        "",
        help="Algorithm of areno train --algo whose loss is taken, such as gmpo or simpo, or yours as file.py:NAME; one such "
        "as cispo sets the knobs of the policy loss that are not given.",
    )
    algorithm_options: dict[str, Any] = setting({}, help="Options that algorithm declares, by name.")


@dataclass
class PPOActorConfig(PolicyLossOptions, NamedAlgorithm, TrainEngineConfig):
    """The policy: one loss, whose knobs give the algorithms, or the loss of an algorithm by name."""

    ppo_n_minibatches: int = setting(4, minimum=1, help="Optimizer steps that a batch is divided into.")
    ppo_n_epochs: int = setting(1, minimum=1, help="Training passes over a batch, each of ppo_n_minibatches steps.")
    reward_norm: NormConfig | None = section(None, help="Normalisation of rewards, before advantages.")
    reward_scaling: float = setting(1.0, help="Rewards are multiplied by it, after the bias.")
    reward_bias: float = setting(0.0, help="Added to rewards.")
    reward_clip: float = setting(20.0, above=0, help="Scaled rewards are clipped to this magnitude.")
    overlong_reward_penalty: bool = setting(False, help="DAPO: lower the reward of answers near the length limit.")
    overlong_tokens: int | None = setting(None, minimum=1, help="Length of the tail in which the penalty grows.")
    overlong_penalty_factor: float | None = setting(None, above=0, help="Penalty at the limit.")
    mask_no_eos_with_zero: bool = setting(False, help="An answer that was cut off gets no task reward.")
    discount: float = setting(1.0, minimum=0, maximum=1, help="Discount of later rewards, per token.")
    gae_lambda: float = setting(1.0, minimum=0, maximum=1, help="Lambda of generalised advantage estimation.")
    adv_norm: NormConfig | None = section(None, help="Normalisation of advantages over tokens.")
    kl_ctl: float = setting(
        0.1,
        minimum=0,
        shown="0.1 with a ref and without kl_loss_coef, else 0",
        help="Coefficient of the KL to the reference in the reward.",
    )
    kl_estimator: str = setting("k1", choices=("k1", "k2", "k3"), help="Estimator of that KL.")
    kl_loss_coef: float = setting(0.0, minimum=0, help="Coefficient of a KL to the reference in the loss.")
    kl_loss_type: str = setting("low_var_kl", choices=KL_TYPES, help="Estimator of that one.")
    recompute_logprob: bool = setting(
        False, help="Take log-probs anew with the weights before the update, instead of those of rollout."
    )
    rejection_sampling: RejectionSamplingConfig | None = section(
        None, help="Bounds on the importance weight of the decoupled loss; null leaves the weight as it is."
    )
    log_agent_stats: bool = setting(False, help="Report the statistics that agents return.")
    log_agent_stats_keys: list[str] = setting([], help="Which ones.")
    max_new_tokens: int = setting(
        1024,
        minimum=1,
        inherits="gconfig.max_new_tokens",
        shown="gconfig.max_new_tokens",
        help="Longest answer; the over-long penalty measures from it.",
    )

    @property
    def takes_reference(self) -> bool:
        """Whether rows need the log-probs of a reference."""
        return self.kl_ctl > 0 or self.kl_loss_coef > 0

    def should_compute_prox_logp(self) -> bool:
        """Whether a forward pass before the update is needed."""
        return self.needs_proximal if self.use_decoupled_loss else self.recompute_logprob


@dataclass
class PPOCriticConfig(TrainEngineConfig):
    """The value model."""

    is_critic: bool = setting(True, help="A critic gives one number per token.")
    ppo_n_minibatches: int = setting(4, minimum=1, help="Optimizer steps that a batch is divided into.")
    ppo_n_epochs: int = setting(1, minimum=1, help="Training passes over a batch, each of ppo_n_minibatches steps.")
    eps_clip: float = setting(0.5, above=0, help="Values move at most this far from the old ones in the clipped loss.")
    mask_no_eos_with_zero: bool = setting(
        False, inherits="actor.mask_no_eos_with_zero", shown="actor.mask_no_eos_with_zero", help="As for the actor."
    )


@dataclass
class DPOEngineConfig(NamedAlgorithm, TrainEngineConfig):
    """A model that learns from pairs."""

    beta: float = setting(0.1, above=0, help="Strength of the pull to the reference.")
    loss_type: str = setting(
        "sigmoid",
        choices=("sigmoid", "ipo", "hinge"),
        help="sigmoid is DPO; ipo is IPO, with log-probs averaged per token; hinge is SLiC.",
    )
    label_smoothing: float = setting(0.0, minimum=0, below=0.5, help="Assumed share of swapped preferences.")


@dataclass
class TeacherConfig:
    """A second model whose policy the actor is drawn to (on-policy distillation)."""

    engine_type: str = setting(
        "rollout", choices=("rollout", "train"), help="Whether an inference or a training engine scores."
    )
    rollout: InferenceEngineConfig | None = section(
        None,
        inner={"backend": "rollout.backend", "use_lora": "", "lora_name": ""},
        help="The engine of engine_type rollout.",
    )
    train: PPOActorConfig | None = section(
        None, inner={"path": "teacher.path"}, help="The engine of engine_type train."
    )
    path: str = setting("", help="Model folder or repo id of the teacher.")
    offload: bool = setting(False, help="Move the teacher to host memory between steps.", refused=NO_OFFLOAD)
    rl_loss_weight: float = setting(1.0, minimum=0, help="Weight of the policy loss.")
    distill_loss_weight: float = setting(0.005, minimum=0, help="Weight of the distillation loss.")
