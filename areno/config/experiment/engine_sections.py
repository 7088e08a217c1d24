"""Sections of models that are trained or that score: actor, critic, reference, teacher."""

from __future__ import annotations

from dataclasses import dataclass
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
from areno.config.experiment.update_sections import (
    NO_OFFLOAD,
    FSDPEngineConfig,
    MicroBatchSpec,
    NormConfig,
    OptimizerConfig,
)
from areno.config.experiment.worker_sections import SchedulingSpec, SchedulingStrategy, one_spec
from areno.config.policy_loss_options import PolicyLossOptions, RejectionSamplingConfig
from areno.config.update_options import KL_TYPES

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
        False,
        inherits="actor.mask_no_eos_with_zero",
        shown="actor.mask_no_eos_with_zero",
        help="As for the actor.",
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
