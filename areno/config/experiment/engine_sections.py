"""Configuration sections for the models of a run: actor, critic, reference and teacher."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from areno.config.experiment.backend_sections import ArchonEngineConfig, MegatronEngineConfig
from areno.config.experiment.generation_sections import (
    ADMIN_KEY,
    NO_GATEWAY,
    InferenceEngineConfig,
    of_gateway,
    start_timeout,
)
from areno.config.experiment.optimization_sections import MicroBatchSpec, NormConfig, OptimizerConfig
from areno.config.experiment.setting_declaration import Problems, ineffective, section, setting
from areno.config.experiment.worker_sections import SchedulingSpec, SchedulingStrategy, one_spec, worker_problems
from areno.config.options import nearest
from areno.config.packages import missing_packages
from areno.config.policy_loss_options import PolicyLossOptions, RejectionSamplingConfig
from areno.config.train_options import KL_TYPES

AUTO = "auto"
"""Placeholder for a value that depends on the machine."""

DTYPES = (AUTO, "float32", "bfloat16", "float16")
"""Compute dtypes."""

DTYPE_SYNONYMS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Short names of dtypes."""

ATTENTION = (AUTO, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Names of attention implementations; a Hub kernel is written ``owner/repo[@revision][:entry]``."""

SUPPORTED_ATTENTION = (AUTO, "sdpa", "eager", "flash_attention_2")
"""Supported attention implementations. ``eager`` computes the score matrix; the other implementations are fused kernels."""

_HUB_KERNEL = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?(:[\w.]+)?")
_MEGATRON_LAYERS = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
_TRANSFORMERS_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class FSDPWrapPolicy:
    """Modules that FSDP wraps."""

    transformer_layer_cls_to_wrap: list[str] | None = setting(
        None, "Class names of the modules to wrap individually. If null, FSDP wraps each decoder layer."
    )


@dataclass
class FSDPEngineConfig:
    """Sharding and offloading. These settings apply to every training backend, not only to fsdp."""

    shard_weights: bool | None = setting(
        None,
        "Shard weights and gradients across data-parallel and context-parallel ranks (FSDP2). If false, only shard "
        "optimizer states (ZeRO-1). Context and expert parallelism always shard weights.",
        shown="true if there are several data-parallel ranks, optimizer.type is adam and use_lora is false. With tensor "
        "parallelism, the default is true only with transformers 5.23 or later. For the backend megatron: true if "
        "megatron.use_torch_fsdp2 or megatron.use_custom_fsdp is true",
    )
    wrap_policy: FSDPWrapPolicy | None = section(None, "Modules that FSDP wraps.")
    offload_params: bool = setting(
        False,
        "For training on a GPU: keep sharded parameters in host memory, and copy the parameters of each layer to the GPU when "
        "they are needed.",
    )
    memory_efficient_load: bool = setting(
        False,
        "Read sharded weights only on the first rank of each pipeline stage. This rank sends them to the other ranks "
        "layer by layer (with expert parallelism: all at once). No effect with tensor parallelism.",
    )
    per_layer_optim_step: bool = setting(False, "Has the same effect as optimizer.offload (GPU only).")
    optim_step_prefetch_layers: int = setting(
        1,
        "Number of layers whose optimizer states are prefetched.",
        minimum=0,
        no_effect="areno updates offloaded optimizer states in host memory and prefetches nothing",
    )
    shard_vision_across_sp: bool = setting(
        False,
        "Distribute the images of a vision model over the context-parallel ranks.",
        refused="vision models are not supported; remove the setting",
    )


@dataclass
class TrainEngineConfig:
    """A model with its training settings and its devices."""

    experiment_name: str = setting(
        "", "Experiment name. Set the top-level setting `experiment_name` instead.", inherits="experiment_name"
    )
    trial_name: str = setting("", "Trial name. Set the top-level setting `trial_name` instead.", inherits="trial_name")
    path: str = setting(
        "",
        "Model: a folder, a .gguf file or a repo id. The sections ref and critic inherit the path of actor.",
        inherits="actor.path",
        required=True,
    )
    model_type: str = setting("", "Expected model family, such as qwen3. A model of another family is an error.")
    attn_impl: str = setting(
        AUTO,
        "Attention implementation: auto, eager, sdpa or flash_attention_2. areno does not support "
        "flash_attention_3, flex_attention or attention kernels from the Hugging Face Hub.",
        inherits="actor.attn_impl",
        documented="flash_attention_2",
        shown="auto (flash_attention_2 on a single machine with GPUs and the package flash-attn, else sdpa)",
    )
    use_kernels: bool = setting(False, "Use kernels from the Hugging Face Hub for the layers that have such a kernel.")
    init_from_scratch: bool = setting(False, "Start from random weights.")
    is_critic: bool = setting(
        False,
        "Give the model a scalar head, which returns one number per token. Critics and reward models need this head.",
    )
    temperature: float = setting(
        1.0,
        "Temperature at which log-probs are computed.",
        above=0,
        inherits="gconfig.temperature",
        shown="gconfig.temperature, else 1.0",
    )
    mb_spec: MicroBatchSpec = section(MicroBatchSpec, "How an optimizer step is split into microbatches.")
    pad_to_maximum: bool = setting(
        False,
        "Pad every microbatch to max_tokens_per_mb.",
        no_effect="packed microbatches need no padding",
    )
    disable_dropout: bool = setting(
        False,
        "Train without dropout.",
        no_effect="training never uses dropout, because dropout would make the importance ratios noisy",
    )
    gradient_checkpointing: bool = setting(False, "Recompute activations in the backward pass to save memory.")
    offload_activations: bool = setting(
        False, "Keep the inputs of recomputed layers in host memory until the backward pass (GPU only)."
    )
    dtype: str = setting(
        AUTO,
        "Dtype of the forward and backward passes.",
        choices=DTYPES,
        synonyms=DTYPE_SYNONYMS,
        inherits="actor.dtype",
        documented="bfloat16",
        shown="auto (GPU: bfloat16, CPU: float32)",
    )
    grad_reduce_dtype: str = setting(
        "float32",
        "Dtype in which gradients are reduced across ranks.",
        choices=DTYPES[1:3],
        synonyms=DTYPE_SYNONYMS,
    )
    optimizer_dtype: str = setting(
        "float32",
        "Dtype of the moments if optimizer.type is adam. Master weights are always float32.",
        choices=DTYPES[1:3],
        synonyms=DTYPE_SYNONYMS,
    )
    optimizer: OptimizerConfig | None = section(None, "The optimizer. The actor and the critic need an optimizer.")
    weight_update_mode: str = setting(
        AUTO,
        "How new weights are sent to the rollout replicas: through shared memory (shm), a collective (xccl) "
        "or a checkpoint on disk (disk).",
        choices=(AUTO, "shm", "disk", "xccl"),
        documented="xccl",
        shown="auto (CPU: shm, or xccl on a cluster. GPU: xccl if rollout.backend is areno and the rollout has its own GPUs, "
        "else shm on a single machine and disk on a cluster)",
    )
    fsdp: FSDPEngineConfig = section(FSDPEngineConfig, "Sharding and offloading for every training backend.")
    archon: ArchonEngineConfig = section(ArchonEngineConfig, "Settings of the backend archon.")
    megatron: MegatronEngineConfig = section(MegatronEngineConfig, "Settings of the backend megatron.")
    offload: bool = setting(
        False,
        "Has the effect of optimizer.offload and, if the weights are sharded, of fsdp.offload_params (GPU only).",
    )
    use_lora: bool = setting(False, "Train a LoRA adapter and freeze the weights of the model.")
    lora_rank: int = setting(32, "Rank of the adapter.", minimum=1)
    lora_alpha: int = setting(16, "Alpha of the adapter, whose output is scaled by lora_alpha / lora_rank.", minimum=1)
    target_modules: list[str] = setting(
        [],
        "Linear layers that get an adapter, given by the last part of their names, such as q_proj.",
        shown="all linear layers",
    )
    load_in_4bit: bool = setting(
        False,
        "Store the frozen weights in 4 bits with bitsandbytes (QLoRA: nf4 with double quantization).",
    )
    peft_type: str = setting("lora", "Kind of adapter.", choices=("lora",))
    enable_tree_training: bool = setting(
        False, "Compute a prefix only once if several rows of a microbatch share this prefix."
    )
    scheduling_spec: list[SchedulingSpec] = section(
        one_spec, "Resources of the workers. A second list entry has no effect."
    )
    backend: str = setting(
        "",
        "Engine and parallel sizes, such as fsdp:d2t2 (two data-parallel replicas of two tensor-parallel devices each).",
        inherits="actor.backend",
        required=True,
    )
    _version: str = setting(
        "v1",
        "Whether the run trains in its own workers (v1) or in services behind a gateway (v2).",
        choices=("v1", "v2"),
        refused=NO_GATEWAY,
    )
    admin_api_key: str = of_gateway("", "API key of the gateway services.", shown=ADMIN_KEY)
    log_level: str = of_gateway("warning", "Log level of the gateway services.")
    request_timeout: float = setting(
        3600.0, "Abort a run with several ranks if one rank makes no progress for this many seconds.", above=0
    )
    setup_timeout: float = setting(3600.0, "Seconds that a worker may take to load its model.", above=0)
    workers_ready_timeout: float = start_timeout(
        30.0, "Seconds that a worker process may take to respond after its start.", above=0
    )
    scheduling_strategy: SchedulingStrategy = section(SchedulingStrategy, "Whether the role has its own devices.")

    def problems(self) -> Problems:
        """Yield the problems with settings of this section."""
        name = self.attn_impl
        choices = f"choose {', '.join(SUPPORTED_ATTENTION)}"
        if name not in ATTENTION and not _HUB_KERNEL.fullmatch(name):
            yield "attn_impl", f"{name!r} is unknown{nearest(name, SUPPORTED_ATTENTION)}; {choices}"
        elif name not in SUPPORTED_ATTENTION:
            yield "attn_impl", f"{name} is not supported; {choices}"
        if self.use_kernels and (missing := missing_packages("kernels")):
            yield "use_kernels", f"needs {missing}"
        if not self.use_lora:
            names = ("lora_rank", "lora_alpha", "target_modules", "load_in_4bit")
            yield from ineffective(self, names, "without an adapter; set use_lora too")
        elif missing := missing_packages("qlora" if self.load_in_4bit else "lora"):
            yield ("load_in_4bit" if self.load_in_4bit else "use_lora"), f"needs {missing}"
        if self.optimizer is None:
            yield from ineffective(
                self,
                ("offload",),
                "on a model that is not trained; remove the setting, or set actor.fsdp.offload_params, which also applies to "
                "this model",
            )
        if not self.gradient_checkpointing:
            because = (
                "without gradient_checkpointing, because only the inputs of recomputed layers can be offloaded; set "
                "gradient_checkpointing too"
            )
            yield from ineffective(self, ("offload_activations",), because)
        if self.enable_tree_training and self.mb_spec.packing_algorithm != "ffd":
            problem = f"is not supported with mb_spec.packing_algorithm {self.mb_spec.packing_algorithm}"
            remedy = "set mb_spec.packing_algorithm to ffd, or remove mb_spec.packing_algorithm"
            yield "enable_tree_training", f"{problem}; {remedy}"
        if megatron := sorted({*self.target_modules} & _MEGATRON_LAYERS):
            remedy = f"write [{', '.join(_TRANSFORMERS_LAYERS)}], or remove target_modules to adapt all linear layers"
            yield "target_modules", f"contains names of Megatron layers ({', '.join(megatron)}); {remedy}"
        yield from worker_problems(self.scheduling_spec, (1, 2))


@dataclass
class NamedAlgorithm:
    """Settings that select an algorithm by name."""

    algorithm: str = setting(
        "",
        "Algorithm, as in `areno train --algo`. Some, such as gmpo, simpo or your own (file.py:NAME), provide a loss. Others "
        "change defaults of areno's policy loss: cispo sets use_cispo_loss.",
    )
    algorithm_options: dict[str, Any] = setting({}, "Values of the algorithm's options, by option name.")


@dataclass
class PPOActorConfig(PolicyLossOptions, NamedAlgorithm, TrainEngineConfig):
    """The policy and its training. The loss is areno's policy loss, unless `algorithm` names an algorithm with its own loss."""

    ppo_n_minibatches: int = setting(4, "Number of optimizer steps per pass over a batch.", minimum=1)
    ppo_n_epochs: int = setting(
        1, "Number of passes over a batch. Each pass takes ppo_n_minibatches optimizer steps.", minimum=1
    )
    reward_norm: NormConfig | None = section(None, "Normalization of the rewards before the advantages are computed.")
    reward_scaling: float = setting(1.0, "Factor by which rewards are multiplied after reward_bias is added.")
    reward_bias: float = setting(0.0, "Offset that is added to rewards.")
    reward_clip: float = setting(20.0, "Clip scaled rewards to this magnitude.", above=0)
    overlong_reward_penalty: bool = setting(
        False, "Penalize answers that come close to the length limit, as DAPO does."
    )
    overlong_tokens: int | None = setting(
        None,
        "Length in tokens of the penalized range, which ends at the length limit.",
        minimum=1,
    )
    overlong_penalty_factor: float | None = setting(
        None,
        "Penalty at the length limit. A conversation with several turns can exceed the limit, because its turns are counted "
        "together. It then gets a larger penalty.",
        above=0,
    )
    mask_no_eos_with_zero: bool = setting(
        False, "Exclude truncated answers from training, and set their task reward to 0."
    )
    discount: float = setting(1.0, "Discount factor of rewards, per token.", minimum=0, maximum=1)
    gae_lambda: float = setting(1.0, "Lambda of generalized advantage estimation.", minimum=0, maximum=1)
    adv_norm: NormConfig | None = section(None, "Normalization of advantages over tokens.")
    kl_ctl: float = setting(
        0.1,
        "Coefficient of the KL penalty in the reward. The penalty keeps the policy close to the reference.",
        minimum=0,
        shown="0.1 with a ref and without kl_loss_coef, else 0",
    )
    kl_estimator: str = setting(
        "k1", "Estimator of the KL penalty in the reward (see kl_ctl).", choices=("k1", "k2", "k3")
    )
    kl_loss_coef: float = setting(
        0.0, "Coefficient of the KL term in the loss. The term keeps the policy close to the reference.", minimum=0
    )
    kl_loss_type: str = setting(
        "low_var_kl", "Estimator of the KL term in the loss (see kl_loss_coef).", choices=KL_TYPES
    )
    recompute_logprob: bool = setting(
        False,
        "Before training on a batch, recompute its log-probs with the current weights. Without use_decoupled_loss, "
        "the recomputed log-probs replace those of the rollout.",
    )
    rejection_sampling: RejectionSamplingConfig | None = section(
        None,
        "Bounds on the difference between proximal and behavior policy (only with use_decoupled_loss). If null, there are no "
        "bounds.",
    )
    log_agent_stats: bool = setting(
        False,
        "Report additional numbers that a workflow returns. log_agent_stats_keys lists the keys of these numbers.",
    )
    log_agent_stats_keys: list[str] = setting([], "Keys that log_agent_stats reports. An empty list reports nothing.")
    max_new_tokens: int = setting(
        1024,
        "Maximum number of tokens in an answer. The overlong penalty uses this number as the length limit.",
        minimum=1,
        inherits="gconfig.max_new_tokens",
        shown="gconfig.max_new_tokens",
    )

    @property
    def takes_reference(self) -> bool:
        """Whether the loss or the rewards need log-probs of the reference."""
        return self.kl_ctl > 0 or self.kl_loss_coef > 0

    def should_compute_prox_logp(self) -> bool:
        """Whether log-probs must be computed before the update, with an additional forward pass."""
        return self.needs_proximal if self.use_decoupled_loss else self.recompute_logprob

    def problems(self) -> Problems:
        """Yield the problems that matter both for the trained actor and for a frozen model, such as the reference."""
        return TrainEngineConfig.problems(self)

    def policy_problems(self) -> Problems:
        """Yield the problems with the loss and reward settings of a trained actor."""
        yield from PolicyLossOptions.problems(self)
        if self.use_decoupled_loss and self.recompute_logprob and not self.needs_proximal:
            because = (
                f"with prox_logp_method {self.prox_logp_method}, which needs no forward pass; use only one of the two "
                "settings"
            )
            yield "recompute_logprob", f"has no effect {because}"
        if self.kl_ctl == 0:
            yield from ineffective(self, ("kl_estimator",), "with kl_ctl 0; set kl_ctl above 0")
        if self.kl_loss_coef == 0:
            yield from ineffective(self, ("kl_loss_type",), "with kl_loss_coef 0; set kl_loss_coef above 0")
        if any(not key.strip() for key in self.log_agent_stats_keys):
            yield "log_agent_stats_keys", "contains an empty key; remove the empty key"
        if not self.log_agent_stats:
            yield from ineffective(self, ("log_agent_stats_keys",), "without log_agent_stats; set log_agent_stats too")
        overlong = ("overlong_tokens", "overlong_penalty_factor")
        if not self.overlong_reward_penalty:
            yield from ineffective(self, overlong, "without overlong_reward_penalty; set overlong_reward_penalty too")
            return
        for name in overlong:
            if getattr(self, name) is None:
                yield name, f"is missing, but overlong_reward_penalty needs this setting; set actor.{name}"
        if self.overlong_tokens is not None and self.overlong_tokens > self.max_new_tokens:
            problem = f"{self.overlong_tokens} is above max_new_tokens {self.max_new_tokens}; lower overlong_tokens"
            yield "overlong_tokens", problem


@dataclass
class PPOCriticConfig(TrainEngineConfig):
    """The value model and its training."""

    is_critic: bool = setting(True, "Must be true, because a critic needs a scalar head.")
    ppo_n_minibatches: int = setting(4, "Number of optimizer steps per pass over a batch.", minimum=1)
    ppo_n_epochs: int = setting(
        1, "Number of passes over a batch. Each pass takes ppo_n_minibatches optimizer steps.", minimum=1
    )
    eps_clip: float = setting(
        0.5,
        "In the value loss, clip each predicted value to at most this distance from the value predicted before the update. The "
        "distance has the unit of rewards.",
        above=0,
    )
    mask_no_eos_with_zero: bool = setting(
        False,
        "Exclude truncated answers from training, and set their task reward to 0. The value must equal "
        "actor.mask_no_eos_with_zero.",
        inherits="actor.mask_no_eos_with_zero",
        shown="actor.mask_no_eos_with_zero",
    )


@dataclass
class DPOEngineConfig(NamedAlgorithm, TrainEngineConfig):
    """Settings of the policy, or of the reference, in a `DPOConfig`."""

    beta: float = setting(0.1, "Strength of the regularization towards the reference.", above=0)
    loss_type: str = setting(
        "sigmoid",
        "Loss: sigmoid (DPO), ipo (IPO with log-probs averaged per token) or hinge (SLiC).",
        choices=("sigmoid", "ipo", "hinge"),
    )
    label_smoothing: float = setting(
        0.0, "Assumed fraction of pairs whose preference label is wrong.", minimum=0, below=0.5
    )


@dataclass
class TeacherConfig:
    """A teacher model for on-policy distillation."""

    engine_type: str = setting(
        "rollout",
        "Which of the sections teacher.rollout and teacher.train may be set. The value has no other effect: the teacher "
        "runs in the actor's engine, or on a server if teacher.path is an address.",
        choices=("rollout", "train"),
    )
    rollout: InferenceEngineConfig | None = section(
        None,
        "Accepted only with engine_type rollout. The teacher has no separate engine, so a setting of this section must have "
        "its default, or the value that it has in actor, rollout or gconfig.",
        inner={"backend": "rollout.backend", "use_lora": "", "lora_name": ""},
    )
    train: PPOActorConfig | None = section(
        None,
        "Accepted only with engine_type train. The teacher has no separate engine, so a setting of this section must have "
        "its default, or the value that it has in actor, rollout or gconfig.",
        inner={"path": "teacher.path"},
    )
    path: str = setting(
        "", "Teacher model: a folder, a repo id, or the address of a server, such as http://HOST:8000/v1."
    )
    offload: bool = setting(
        False,
        "Move the teacher to host memory between steps.",
        refused="areno cannot move the teacher alone to host memory; remove the setting, or, if the actor's weights are "
        "sharded, keep the weights of both actor and teacher in host memory with actor.fsdp.offload_params",
    )
    rl_loss_weight: float = setting(1.0, "Weight of the policy loss.", minimum=0)
    distill_loss_weight: float = setting(0.005, "Weight of the distillation loss.", minimum=0)

    def problems(self) -> Problems:
        """Yield the problems with settings of this section."""
        other = "train" if self.engine_type == "rollout" else "rollout"
        if getattr(self, other) is not None:
            yield other, f"has no effect with engine_type {self.engine_type}; remove the setting"
        if not self.path:
            yield "path", "is missing; set teacher.path to a model folder or a repo id"
        if self.rl_loss_weight == self.distill_loss_weight == 0:
            yield (
                "distill_loss_weight",
                "is 0, and rl_loss_weight is 0 too, so nothing is learned; set one of the two weights above 0",
            )
