"""Sections of models that are trained or that score, and of an optimizer step: actor, critic, reference, teacher."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from areno.config.experiment.foreign_sections import ArchonEngineConfig, MegatronEngineConfig
from areno.config.experiment.generation_sections import (
    ADMIN_KEY,
    NO_GATEWAY,
    InferenceEngineConfig,
    loading_timeout,
    of_gateway,
)
from areno.config.experiment.settings import Problems, idle, section, setting
from areno.config.experiment.worker_sections import SchedulingSpec, SchedulingStrategy, one_spec, worker_problems
from areno.config.options import nearest
from areno.config.packages import missing_packages
from areno.config.policy_loss_options import PolicyLossOptions, RejectionSamplingConfig
from areno.config.update_options import KL_TYPES

AUTO = "auto"
"""Value of a setting that takes what the machine has."""

DTYPES = (AUTO, "float32", "bfloat16", "float16")
"""Number formats that areno computes in."""

DTYPE_SYNONYMS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Short names of number formats."""

ATTENTION = (AUTO, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Attention by name; a kernel of the Hugging Face hub is given as ``owner/repo[@revision][:entry]``."""


ATTENTION_HERE = (AUTO, "sdpa", "eager", "flash_attention_2")
"""Those that areno has: PyTorch's fused kernels, or (eager) every score written out."""

_HUB_KERNEL = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?(:[\w.]+)?")
_MEGATRON_LAYERS = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
_TRANSFORMERS_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class OptimizerConfig:
    """Optimizer, learning-rate schedule and gradient clipping."""

    type: str = setting(
        "adam",
        "adam is AdamW with fp32 moments; adam_8bit keeps moments in 8 bits, adam_bf16 in bf16; sgd has none.",
        choices=("adam", "sgd", "adam_8bit", "adam_bf16"),
    )
    lr: float = setting(0.001, "Peak learning rate.", above=0)
    weight_decay: float = setting(0.01, "Decoupled weight decay.", minimum=0)
    beta1: float = setting(0.9, "Decay of the first moment; adam and adam_bf16.", minimum=0, below=1)
    beta2: float = setting(0.999, "Decay of the second moment; adam and adam_bf16.", minimum=0, below=1)
    eps: float = setting(1e-08, "Added to the root of the second moment; adam and adam_bf16.", above=0)
    min_lr_ratio: float = setting(
        0.0, "Where a linear or cosine schedule ends, as a share of lr.", minimum=0, maximum=1
    )
    lr_scheduler_type: str = setting(
        "constant", "Shape of the schedule after warm-up.", choices=("linear", "cosine", "constant")
    )
    warmup_steps_proportion: float = setting(
        0.001, "Share of all steps in which the rate rises linearly from 0 to lr.", minimum=0, maximum=1
    )
    initial_loss_scale: float = setting(float(2**32), "First loss scale; dtype float16.", above=0)
    min_loss_scale: float = setting(1.0, "Least loss scale; dtype float16.", above=0)
    loss_scale_window: float = setting(
        5.0, "Steps without overflow before the loss scale is doubled; dtype float16.", above=0
    )
    hysteresis: int = setting(2, "Overflows before the loss scale is halved; dtype float16.", minimum=1)
    gradient_clipping: float = setting(1.0, "Gradients are scaled down to at most this global norm.", above=0)
    offload: bool = setting(
        False, "GPU only: keep optimizer states and summed gradients in host memory, and update there."
    )

    def problems(self) -> Problems:
        """What is wrong within the section."""
        if self.type == "sgd":
            yield from idle(self, ("beta1", "beta2", "eps"), "with type sgd; leave it out, or use type adam")
        if self.lr_scheduler_type == "constant":
            yield from idle(self, ("min_lr_ratio",), "with lr_scheduler_type constant; use linear or cosine")


@dataclass
class MicroBatchSpec:
    """How the rows of an optimizer step are cut into forward and backward passes; results do not depend on it."""

    n_mbs: int | None = setting(
        1, "Number of micro-batches per device; the least number when max_tokens_per_mb is set.", minimum=1
    )
    granularity: int = setting(1, "Adjacent rows that always stay in one micro-batch, such as pairs.", minimum=1)
    max_tokens_per_mb: int | None = setting(
        None, "Most tokens of a micro-batch. Set it to what fits into memory; longer rows stand alone.", minimum=1
    )
    n_mbs_divisor: int = setting(1, "The number of micro-batches becomes a multiple of this.", minimum=1)
    packing_algorithm: str = setting(
        "ffd",
        "ffd (first fit, longest first) makes few micro-batches; kk (Karmarkar-Karp) makes equally heavy ones.",
        choices=("ffd", "kk"),
    )

    def new(self, **changes: Any) -> MicroBatchSpec:
        """Return a copy with some values changed."""
        return replace(self, **changes)

    def problems(self) -> Problems:
        """What is wrong within the section."""
        if self.n_mbs is None and self.max_tokens_per_mb is None:
            yield "n_mbs", "null leaves the number of micro-batches open; give it, or max_tokens_per_mb"


@dataclass
class NormConfig:
    """Normalisation (x - mean) / (std + eps) of rewards or advantages."""

    mean_level: str | None = setting(
        "batch", "Over what the mean is taken; null subtracts nothing.", choices=("batch", "group")
    )
    mean_leave1out: bool = setting(False, "Compare each value with the mean of the others (leave-one-out).")
    std_level: str | None = setting(
        "batch", "Over what the standard deviation is taken; null divides by nothing.", choices=("batch", "group")
    )
    std_unbiased: bool = setting(True, "Divide the squared deviations by n - 1 instead of n.")
    eps: float = setting(1e-05, "Added to the standard deviation.", minimum=0)
    group_size: int = setting(
        1,
        "Consecutive rows of a group: the answers to one prompt.",
        minimum=1,
        inherits="gconfig.n_samples",
        shown="gconfig.n_samples",
    )

    def problems(self) -> Problems:
        """What is wrong within the section."""
        if self.mean_level is None:
            yield from idle(self, ("mean_leave1out",), "without a mean; set mean_level too")
        if self.std_level is None:
            yield from idle(self, ("std_unbiased", "eps"), "without a standard deviation; set std_level too")
        if self.mean_level is None and self.std_level is None:
            yield "mean_level", "and std_level are both null, which normalises nothing; set the section to null instead"


@dataclass
class FSDPWrapPolicy:
    """Which modules are sharded together."""

    transformer_layer_cls_to_wrap: list[str] | None = setting(
        None, "Class names of the modules that are sharded one by one; null takes the decoder layers."
    )


@dataclass
class FSDPEngineConfig:
    """Settings of the ``fsdp`` training backend."""

    shard_weights: bool | None = setting(
        None,
        "Shard weights and gradients across the d replicas (FSDP2); false shards the optimizer's state only (ZeRO-1).",
        shown="true for fp32 AdamW on d2 or more, without t and LoRA",
    )
    wrap_policy: FSDPWrapPolicy | None = section(None, "Which modules are sharded together.")
    offload_params: bool = setting(False, "GPU only: keep parameters in host memory between uses.")
    memory_efficient_load: bool = setting(
        False,
        "With sharded weights, read them on one rank and send them to the others layer by layer; no rank but it holds all.",
    )
    per_layer_optim_step: bool = setting(
        False,
        "GPU only: keep optimizer states in host memory, as optimizer.offload does; updates are made there.",
    )
    optim_step_prefetch_layers: int = setting(
        1,
        "Layers whose optimizer state is fetched ahead with per_layer_optim_step.",
        minimum=0,
        no_effect="states that wait in host memory are updated there, and not fetched",
    )
    shard_vision_across_sp: bool = setting(
        False,
        "Spread the images of a vision model over the context ranks.",
        refused="vision models are not supported; remove it",
    )


@dataclass
class TrainEngineConfig:
    """A model, how it is trained and on which devices."""

    experiment_name: str = setting("", "Written once, at the top.", inherits="experiment_name")
    trial_name: str = setting("", "Written once, at the top.", inherits="trial_name")
    path: str = setting(
        "",
        "Model folder, .gguf file or repo id; ref and critic start from the actor's.",
        inherits="actor.path",
        required=True,
    )
    model_type: str = setting("", "Model family, such as qwen3; a checkpoint of another one is refused.")
    attn_impl: str = setting(
        AUTO,
        "Attention: eager, sdpa, flash_attention_2, flash_attention_3, flex_attention, or a kernel of the hub as "
        "owner/repo[@revision][:entry].",
        inherits="actor.attn_impl",
        documented="flash_attention_2",
        shown="auto (GPU: flash_attention_2 if installed; CPU: sdpa)",
    )
    use_kernels: bool = setting(
        False,
        "Let kernels of the Hugging Face hub compute layers that they have been written for.",
    )
    init_from_scratch: bool = setting(False, "Start from random weights of the model's shape.")
    is_critic: bool = setting(False, "The model gives one number per token (critic, reward model), not a policy.")
    temperature: float = setting(
        1.0,
        "Logits are divided by it before log-probs are taken.",
        above=0,
        inherits="gconfig.temperature",
        shown="gconfig.temperature, else 1.0",
    )
    mb_spec: MicroBatchSpec = section(MicroBatchSpec, "How a step is cut into micro-batches.")
    pad_to_maximum: bool = setting(
        False,
        "Pad every micro-batch to max_tokens_per_mb.",
        no_effect="micro-batches are packed, which needs no padding",
    )
    disable_dropout: bool = setting(
        False,
        "Train without dropout. areno always does: rollout never drops, and ratios would be noise.",
        no_effect="training never drops, because rollout does not",
    )
    gradient_checkpointing: bool = setting(False, "Compute activations again in the backward pass to save memory.")
    offload_activations: bool = setting(
        False, "GPU only: keep the inputs of recomputed layers in host memory until the backward pass."
    )
    dtype: str = setting(
        AUTO,
        "Number format of forward and backward passes.",
        choices=DTYPES,
        synonyms=DTYPE_SYNONYMS,
        inherits="actor.dtype",
        documented="bfloat16",
        shown="auto (GPU: bfloat16, CPU: float32)",
    )
    grad_reduce_dtype: str = setting(
        "float32",
        "Number format in which gradients are added up across ranks that send them to each other.",
        choices=DTYPES[1:3],
        synonyms=DTYPE_SYNONYMS,
    )
    optimizer_dtype: str = setting(
        "float32",
        "Number format of Adam's moments; master weights stay float32, or small updates would be lost.",
        choices=DTYPES[1:3],
        synonyms=DTYPE_SYNONYMS,
    )
    optimizer: OptimizerConfig | None = section(None, "How the model is trained; null trains nothing.")
    weight_update_mode: str = setting(
        AUTO,
        "How new weights reach rollout: shm by shared memory, xccl by a collective, disk by a checkpoint.",
        choices=(AUTO, "shm", "disk", "xccl"),
        documented="xccl",
        shown="auto (GPU: xccl, CPU: shm)",
    )
    fsdp: FSDPEngineConfig = section(FSDPEngineConfig, "Settings of the backend fsdp.")
    archon: ArchonEngineConfig = section(ArchonEngineConfig, "Settings of the backend archon.")
    megatron: MegatronEngineConfig = section(MegatronEngineConfig, "Settings of the backend megatron.")
    offload: bool = setting(
        False,
        "GPU only: keep optimizer states in host memory, and weights too where they are sharded; updates are made there.",
    )
    use_lora: bool = setting(False, "Train an adapter beside frozen weights.")
    lora_rank: int = setting(32, "Rank of the adapter.", minimum=1)
    lora_alpha: int = setting(16, "The adapter's output is scaled by alpha / rank.", minimum=1)
    target_modules: list[str] = setting(
        [], "Linear layers that get an adapter, by the end of their name.", shown="all linear layers"
    )
    load_in_4bit: bool = setting(
        False, "Hold the frozen weights in 4 bits (QLoRA: nf4, double quantisation, by bitsandbytes)."
    )
    peft_type: str = setting("lora", "Kind of adapter.", choices=("lora",))
    enable_tree_training: bool = setting(False, "Compute shared prefixes of a micro-batch's rows once.")
    scheduling_spec: list[SchedulingSpec] = section(one_spec, "What a worker of this model needs; one or two.")
    backend: str = setting(
        "", "Engine and parallelism, such as fsdp:d2 or fsdp:d2t2.", inherits="actor.backend", required=True
    )
    _version: str = setting(
        "v1", "v2 runs training as services behind a gateway.", choices=("v1", "v2"), refused=NO_GATEWAY
    )
    admin_api_key: str = of_gateway("", "Key of the services of v2.", shown=ADMIN_KEY)
    log_level: str = of_gateway("warning", "Log level of the services of v2.")
    request_timeout: float = setting(
        3600.0, "With several ranks: the run ends when one of them has made no progress for so many seconds.", above=0
    )
    setup_timeout: float = setting(3600.0, "Seconds that a worker may take to load its model.", above=0)
    workers_ready_timeout: float = loading_timeout(30.0, "Seconds that a worker process may take to answer.", above=0)
    scheduling_strategy: SchedulingStrategy = section(SchedulingStrategy, "Whether the role has its own devices.")

    def problems(self) -> Problems:
        """What is wrong within the section."""
        name = self.attn_impl
        if name not in ATTENTION and not _HUB_KERNEL.fullmatch(name):
            choices = f"choose {', '.join(ATTENTION)}, or owner/repo[@revision][:entry]"
            yield "attn_impl", f"{name!r} is unknown{nearest(name, ATTENTION)}; {choices}"
        elif name not in ATTENTION_HERE:
            yield "attn_impl", f"{name} is not supported; leave it out, or choose {', '.join(ATTENTION_HERE[1:])}"
        if self.use_kernels and (missing := missing_packages("kernels")):
            yield "use_kernels", f"needs {missing}"
        if not self.use_lora:
            names = ("lora_rank", "lora_alpha", "target_modules", "load_in_4bit")
            yield from idle(self, names, "without an adapter; set use_lora too")
        elif missing := missing_packages("qlora" if self.load_in_4bit else "lora"):
            yield ("load_in_4bit" if self.load_in_4bit else "use_lora"), f"needs {missing}"
        if self.optimizer is None:
            yield from idle(
                self, ("offload",), "on a model that is not trained; remove it, or set actor.fsdp.offload_params"
            )
        if not self.gradient_checkpointing:
            because = "without gradient_checkpointing, which leaves inputs of layers to offload; set that too"
            yield from idle(self, ("offload_activations",), because)
        if self.enable_tree_training and self.mb_spec.packing_algorithm != "ffd":
            remedy = "set mb_spec.packing_algorithm to ffd, or leave it out"
            yield "enable_tree_training", f"packs rows by what they share; {remedy}"
        if megatron := sorted({*self.target_modules} & _MEGATRON_LAYERS):
            remedy = f"write [{', '.join(_TRANSFORMERS_LAYERS)}], or leave it out for all linear layers"
            yield "target_modules", f"{', '.join(megatron)} are layers of Megatron; {remedy}"
        yield from worker_problems(self.scheduling_spec, (1, 2))


@dataclass
class NamedAlgorithm:
    """An algorithm in place of the loss of a section."""

    algorithm: str = setting(
        "",
        "Algorithm of areno train --algo whose loss is taken, such as gmpo or simpo, or yours as file.py:NAME; one such "
        "as cispo sets the knobs of the policy loss that are not given.",
    )
    algorithm_options: dict[str, Any] = setting({}, "Options that algorithm declares, by name.")


@dataclass
class PPOActorConfig(PolicyLossOptions, NamedAlgorithm, TrainEngineConfig):
    """The policy: one loss, whose knobs give the algorithms, or the loss of an algorithm by name."""

    ppo_n_minibatches: int = setting(4, "Optimizer steps that a batch is divided into.", minimum=1)
    ppo_n_epochs: int = setting(1, "Training passes over a batch, each of ppo_n_minibatches steps.", minimum=1)
    reward_norm: NormConfig | None = section(None, "Normalisation of rewards, before advantages.")
    reward_scaling: float = setting(1.0, "Rewards are multiplied by it, after the bias.")
    reward_bias: float = setting(0.0, "Added to rewards.")
    reward_clip: float = setting(20.0, "Scaled rewards are clipped to this magnitude.", above=0)
    overlong_reward_penalty: bool = setting(False, "DAPO: lower the reward of answers near the length limit.")
    overlong_tokens: int | None = setting(None, "Length of the tail in which the penalty grows.", minimum=1)
    overlong_penalty_factor: float | None = setting(None, "Penalty at the limit.", above=0)
    mask_no_eos_with_zero: bool = setting(False, "An answer that was cut off gets no task reward.")
    discount: float = setting(1.0, "Discount of later rewards, per token.", minimum=0, maximum=1)
    gae_lambda: float = setting(1.0, "Lambda of generalised advantage estimation.", minimum=0, maximum=1)
    adv_norm: NormConfig | None = section(None, "Normalisation of advantages over tokens.")
    kl_ctl: float = setting(
        0.1,
        "Coefficient of the KL to the reference in the reward.",
        minimum=0,
        shown="0.1 with a ref and without kl_loss_coef, else 0",
    )
    kl_estimator: str = setting("k1", "Estimator of that KL.", choices=("k1", "k2", "k3"))
    kl_loss_coef: float = setting(0.0, "Coefficient of a KL to the reference in the loss.", minimum=0)
    kl_loss_type: str = setting("low_var_kl", "Estimator of that one.", choices=KL_TYPES)
    recompute_logprob: bool = setting(
        False, "Take log-probs anew with the weights before the update, instead of those of rollout."
    )
    rejection_sampling: RejectionSamplingConfig | None = section(
        None, "Bounds on the importance weight of the decoupled loss; null leaves the weight as it is."
    )
    log_agent_stats: bool = setting(False, "Report the statistics that agents return.")
    log_agent_stats_keys: list[str] = setting([], "Which ones.")
    max_new_tokens: int = setting(
        1024,
        "Longest answer; the over-long penalty measures from it.",
        minimum=1,
        inherits="gconfig.max_new_tokens",
        shown="gconfig.max_new_tokens",
    )

    @property
    def takes_reference(self) -> bool:
        """Whether rows need the log-probs of a reference."""
        return self.kl_ctl > 0 or self.kl_loss_coef > 0

    def should_compute_prox_logp(self) -> bool:
        """Whether a forward pass before the update is needed."""
        return self.needs_proximal if self.use_decoupled_loss else self.recompute_logprob

    def problems(self) -> Problems:
        """What is wrong with it as an engine, whether it is trained or scores."""
        return TrainEngineConfig.problems(self)

    def policy_problems(self) -> Problems:
        """What is wrong with the knobs of the loss and the reward of an actor that is trained."""
        yield from PolicyLossOptions.problems(self)
        if self.use_decoupled_loss and self.recompute_logprob and not self.needs_proximal:
            because = f"with prox_logp_method {self.prox_logp_method}, which needs no forward pass; leave one out"
            yield "recompute_logprob", f"has no effect {because}"
        if self.kl_ctl == 0:
            yield from idle(self, ("kl_estimator",), "with kl_ctl 0; set kl_ctl too")
        if self.kl_loss_coef == 0:
            yield from idle(self, ("kl_loss_type",), "with kl_loss_coef 0; set kl_loss_coef too")
        if not self.log_agent_stats:
            yield from idle(self, ("log_agent_stats_keys",), "without log_agent_stats; set it too")
        overlong = ("overlong_tokens", "overlong_penalty_factor")
        if not self.overlong_reward_penalty:
            yield from idle(self, overlong, "without the penalty; set overlong_reward_penalty too")
            return
        for name in overlong:
            if getattr(self, name) is None:
                yield name, "is missing: overlong_reward_penalty needs it"
        if self.overlong_tokens is not None and self.overlong_tokens > self.max_new_tokens:
            problem = f"{self.overlong_tokens} is more than max_new_tokens {self.max_new_tokens}; lower it"
            yield "overlong_tokens", problem


@dataclass
class PPOCriticConfig(TrainEngineConfig):
    """The value model."""

    is_critic: bool = setting(True, "A critic gives one number per token.")
    ppo_n_minibatches: int = setting(4, "Optimizer steps that a batch is divided into.", minimum=1)
    ppo_n_epochs: int = setting(1, "Training passes over a batch, each of ppo_n_minibatches steps.", minimum=1)
    eps_clip: float = setting(0.5, "Values move at most this far from the old ones in the clipped loss.", above=0)
    mask_no_eos_with_zero: bool = setting(
        False, "As for the actor.", inherits="actor.mask_no_eos_with_zero", shown="actor.mask_no_eos_with_zero"
    )


@dataclass
class DPOEngineConfig(NamedAlgorithm, TrainEngineConfig):
    """A model that learns from pairs."""

    beta: float = setting(0.1, "Strength of the pull to the reference.", above=0)
    loss_type: str = setting(
        "sigmoid",
        "sigmoid is DPO; ipo is IPO, with log-probs averaged per token; hinge is SLiC.",
        choices=("sigmoid", "ipo", "hinge"),
    )
    label_smoothing: float = setting(0.0, "Assumed share of swapped preferences.", minimum=0, below=0.5)


@dataclass
class TeacherConfig:
    """A second model whose policy the actor is drawn to (on-policy distillation)."""

    engine_type: str = setting(
        "rollout", "Whether an inference or a training engine scores.", choices=("rollout", "train")
    )
    rollout: InferenceEngineConfig | None = section(
        None,
        "The engine of engine_type rollout.",
        inner={"backend": "rollout.backend", "use_lora": "", "lora_name": ""},
    )
    train: PPOActorConfig | None = section(None, "The engine of engine_type train.", inner={"path": "teacher.path"})
    path: str = setting(
        "", "The teacher: a model folder, a repo id, or a server's address, such as http://HOST:8000/v1."
    )
    offload: bool = setting(
        False,
        "Move the teacher to host memory between steps.",
        refused="frozen weights stay on the device unless they are sharded; remove it, or set actor.fsdp.offload_params",
    )
    rl_loss_weight: float = setting(1.0, "Weight of the policy loss.", minimum=0)
    distill_loss_weight: float = setting(0.005, "Weight of the distillation loss.", minimum=0)

    def problems(self) -> Problems:
        """What is wrong within the section."""
        other = "train" if self.engine_type == "rollout" else "rollout"
        if getattr(self, other) is not None:
            yield other, f"has no effect with engine_type {self.engine_type}; leave it out"
        if not self.path:
            yield "path", "is missing: give the teacher's model folder or repo id"
        if self.rl_loss_weight == self.distill_loss_weight == 0:
            yield "distill_loss_weight", "and rl_loss_weight are both 0, so nothing would be learned; give one a weight"
