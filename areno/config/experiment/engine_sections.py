"""Sections of models: actor, critic, reference and teacher."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from areno.config.experiment.backend_sections import ArchonEngineConfig, MegatronEngineConfig
from areno.config.experiment.generation_sections import (
    ADMIN_KEY,
    NO_GATEWAY,
    InferenceEngineConfig,
    loading_timeout,
    of_gateway,
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
        None, "Class names of the modules to wrap individually; null wraps the decoder layers."
    )


@dataclass
class FSDPEngineConfig:
    """Sharding and offloading, with any training backend."""

    shard_weights: bool | None = setting(
        None,
        "Shard weights and gradients across the d x c ranks (FSDP2); false shards only optimizer states (ZeRO-1) if c = e = 1.",
        shown="true if c or e > 1, or if d > 1 with type adam and no LoRA (t > 1 needs transformers 5.23); megatron: "
        "use_torch_fsdp2",
    )
    wrap_policy: FSDPWrapPolicy | None = section(None, "Modules that FSDP wraps.")
    offload_params: bool = setting(False, "GPU only: keep sharded parameters in host memory between uses.")
    memory_efficient_load: bool = setting(
        False,
        "Sharded weights without t and e: one rank loads the model and sends the other ranks their shards layer by layer.",
    )
    per_layer_optim_step: bool = setting(False, "Same as optimizer.offload (GPU only).")
    optim_step_prefetch_layers: int = setting(
        1,
        "Layers whose optimizer state is prefetched with per_layer_optim_step.",
        minimum=0,
        no_effect="optimizer states in host memory are updated in host memory, so nothing is prefetched",
    )
    shard_vision_across_sp: bool = setting(
        False,
        "Distribute the images of a vision model over the context-parallel ranks.",
        refused="vision models are not supported; remove the setting",
    )


@dataclass
class TrainEngineConfig:
    """A model, its training and its devices."""

    experiment_name: str = setting(
        "", "Experiment name; set this name only at the top level.", inherits="experiment_name"
    )
    trial_name: str = setting("", "Trial name; set this name only at the top level.", inherits="trial_name")
    path: str = setting(
        "",
        "Model folder, .gguf file or repo id; ref and critic default to the actor's model.",
        inherits="actor.path",
        required=True,
    )
    model_type: str = setting("", "Model family, such as qwen3; a model of another family is rejected.")
    attn_impl: str = setting(
        AUTO,
        "Attention implementation: auto, eager, sdpa or flash_attention_2. Not supported: flash_attention_3, flex_attention "
        "and Hugging Face Hub kernels (owner/repo[@revision][:entry]).",
        inherits="actor.attn_impl",
        documented="flash_attention_2",
        shown="auto (one machine with GPUs: flash_attention_2 if installed; else sdpa)",
    )
    use_kernels: bool = setting(False, "Use Hugging Face Hub kernels for the layers that they support.")
    init_from_scratch: bool = setting(False, "Start from random weights.")
    is_critic: bool = setting(False, "Return one number per token instead of logits (for a critic or reward model).")
    temperature: float = setting(
        1.0,
        "Softmax temperature of log-probs.",
        above=0,
        inherits="gconfig.temperature",
        shown="gconfig.temperature, else 1.0",
    )
    mb_spec: MicroBatchSpec = section(MicroBatchSpec, "Microbatches of an optimizer step.")
    pad_to_maximum: bool = setting(
        False,
        "Pad every microbatch to max_tokens_per_mb.",
        no_effect="microbatches are packed, which needs no padding",
    )
    disable_dropout: bool = setting(
        False,
        "Train without dropout.",
        no_effect="training never uses dropout, which would make the importance ratios noisy",
    )
    gradient_checkpointing: bool = setting(False, "Recompute activations in the backward pass to save memory.")
    offload_activations: bool = setting(
        False, "GPU only: keep the inputs of recomputed layers in host memory until the backward pass."
    )
    dtype: str = setting(
        AUTO,
        "Dtype of forward and backward passes.",
        choices=DTYPES,
        synonyms=DTYPE_SYNONYMS,
        inherits="actor.dtype",
        documented="bfloat16",
        shown="auto (GPU: bfloat16, CPU: float32)",
    )
    grad_reduce_dtype: str = setting(
        "float32",
        "Dtype of gradient reductions across ranks.",
        choices=DTYPES[1:3],
        synonyms=DTYPE_SYNONYMS,
    )
    optimizer_dtype: str = setting(
        "float32",
        "Dtype of the moments of optimizer.type adam. Master weights are always float32, so that small updates are not lost.",
        choices=DTYPES[1:3],
        synonyms=DTYPE_SYNONYMS,
    )
    optimizer: OptimizerConfig | None = section(None, "Optimizer; required for actor and critic.")
    weight_update_mode: str = setting(
        AUTO,
        "How new weights are sent to the rollout replicas: shm (shared memory), xccl (a collective) or disk (a checkpoint).",
        choices=(AUTO, "shm", "disk", "xccl"),
        documented="xccl",
        shown="auto (CPUs of one machine: shm; else usually xccl)",
    )
    fsdp: FSDPEngineConfig = section(FSDPEngineConfig, "Sharding and offloading, with any backend.")
    archon: ArchonEngineConfig = section(ArchonEngineConfig, "Settings of the backend archon.")
    megatron: MegatronEngineConfig = section(MegatronEngineConfig, "Settings of the backend megatron.")
    offload: bool = setting(
        False,
        "Same as optimizer.offload (GPU only); with sharded weights, also the same as fsdp.offload_params.",
    )
    use_lora: bool = setting(False, "Train an adapter and freeze the weights.")
    lora_rank: int = setting(32, "Rank of the adapter.", minimum=1)
    lora_alpha: int = setting(16, "The adapter's output is scaled by alpha / rank.", minimum=1)
    target_modules: list[str] = setting(
        [], "Linear layers that get an adapter, by the last component of the layer name.", shown="all linear layers"
    )
    load_in_4bit: bool = setting(
        False, "Store the frozen weights in 4 bits (QLoRA: nf4, double quantization, by bitsandbytes)."
    )
    peft_type: str = setting("lora", "Kind of adapter.", choices=("lora",))
    enable_tree_training: bool = setting(False, "Compute the common prefixes of a microbatch's rows only once.")
    scheduling_spec: list[SchedulingSpec] = section(one_spec, "Resources of the workers; a second entry is not used.")
    backend: str = setting(
        "", "Engine and parallelism, such as fsdp:d2 or fsdp:d2t2.", inherits="actor.backend", required=True
    )
    _version: str = setting(
        "v1", "v2 runs training as services behind a gateway.", choices=("v1", "v2"), refused=NO_GATEWAY
    )
    admin_api_key: str = of_gateway("", "Key for the services of v2.", shown=ADMIN_KEY)
    log_level: str = of_gateway("warning", "Log level of the services of v2.")
    request_timeout: float = setting(
        3600.0, "With several ranks: abort the run if a rank makes no progress for this many seconds.", above=0
    )
    setup_timeout: float = setting(3600.0, "Timeout for a worker to load its model, in seconds.", above=0)
    workers_ready_timeout: float = loading_timeout(
        30.0, "Timeout for a worker process to respond, in seconds.", above=0
    )
    scheduling_strategy: SchedulingStrategy = section(SchedulingStrategy, "Whether the role has its own devices.")

    def problems(self) -> Problems:
        """Yield the problems within the section."""
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
                "on a model that is not trained; remove the setting, or set actor.fsdp.offload_params",
            )
        if not self.gradient_checkpointing:
            because = (
                "without gradient_checkpointing: only the inputs of recomputed layers are offloaded; set "
                "gradient_checkpointing too"
            )
            yield from ineffective(self, ("offload_activations",), because)
        if self.enable_tree_training and self.mb_spec.packing_algorithm != "ffd":
            remedy = "set mb_spec.packing_algorithm to ffd, or remove mb_spec.packing_algorithm"
            yield "enable_tree_training", f"needs rows packed by shared prefix; {remedy}"
        if megatron := sorted({*self.target_modules} & _MEGATRON_LAYERS):
            remedy = f"write [{', '.join(_TRANSFORMERS_LAYERS)}], or remove target_modules to adapt all linear layers"
            yield "target_modules", f"{', '.join(megatron)} are layer names of Megatron; {remedy}"
        yield from worker_problems(self.scheduling_spec, (1, 2))


@dataclass
class NamedAlgorithm:
    """An algorithm, selected by name, that provides the loss."""

    algorithm: str = setting(
        "",
        "Algorithm that provides the loss, as in areno train --algo: gmpo, simpo, or your own as file.py:NAME. A variant of "
        "the policy loss, such as cispo, only changes default settings.",
    )
    algorithm_options: dict[str, Any] = setting({}, "Options of the algorithm, by name.")


@dataclass
class PPOActorConfig(PolicyLossOptions, NamedAlgorithm, TrainEngineConfig):
    """The policy and its training. The loss is the policy loss (PolicyLossOptions) or the loss of a named algorithm."""

    ppo_n_minibatches: int = setting(4, "Optimizer steps per pass over a batch.", minimum=1)
    ppo_n_epochs: int = setting(1, "Passes over a batch, each with ppo_n_minibatches optimizer steps.", minimum=1)
    reward_norm: NormConfig | None = section(None, "Normalization of rewards, before advantages are computed.")
    reward_scaling: float = setting(1.0, "Factor by which rewards are multiplied, after the bias is added.")
    reward_bias: float = setting(0.0, "Offset added to rewards.")
    reward_clip: float = setting(20.0, "Clip scaled rewards to this magnitude.", above=0)
    overlong_reward_penalty: bool = setting(False, "DAPO: penalize answers near the length limit.")
    overlong_tokens: int | None = setting(
        None,
        "Length of the penalized range before the limit, in tokens.",
        minimum=1,
    )
    overlong_penalty_factor: float | None = setting(
        None, "Penalty at the length limit. A row of several turns can be longer and be penalized more.", above=0
    )
    mask_no_eos_with_zero: bool = setting(False, "Give truncated answers no task reward, and do not train on them.")
    discount: float = setting(1.0, "Discount factor of rewards, per token.", minimum=0, maximum=1)
    gae_lambda: float = setting(1.0, "Lambda of generalized advantage estimation.", minimum=0, maximum=1)
    adv_norm: NormConfig | None = section(None, "Normalization of advantages over tokens.")
    kl_ctl: float = setting(
        0.1,
        "Coefficient of the KL penalty against the reference in the reward.",
        minimum=0,
        shown="0.1 with a ref and without kl_loss_coef, else 0",
    )
    kl_estimator: str = setting("k1", "Estimator of the KL penalty in the reward (kl_ctl).", choices=("k1", "k2", "k3"))
    kl_loss_coef: float = setting(0.0, "Coefficient of a KL term against the reference in the loss.", minimum=0)
    kl_loss_type: str = setting("low_var_kl", "Estimator of the KL term in the loss (kl_loss_coef).", choices=KL_TYPES)
    recompute_logprob: bool = setting(
        False, "Recompute log-probs with the weights before the update, instead of using the log-probs of the rollout."
    )
    rejection_sampling: RejectionSamplingConfig | None = section(
        None, "Bounds on the importance weight of the decoupled loss; null sets no bounds."
    )
    log_agent_stats: bool = setting(False, "Report the numbers that workflows return under their own keys.")
    log_agent_stats_keys: list[str] = setting([], "Keys that log_agent_stats reports; empty reports none.")
    max_new_tokens: int = setting(
        1024,
        "Maximum number of tokens in an answer, and thus the length limit for the overlong penalty.",
        minimum=1,
        inherits="gconfig.max_new_tokens",
        shown="gconfig.max_new_tokens",
    )

    @property
    def takes_reference(self) -> bool:
        """Whether rows need reference log-probs."""
        return self.kl_ctl > 0 or self.kl_loss_coef > 0

    def should_compute_prox_logp(self) -> bool:
        """Whether a forward pass before the update is needed."""
        return self.needs_proximal if self.use_decoupled_loss else self.recompute_logprob

    def problems(self) -> Problems:
        """Yield the problems that do not depend on whether the actor is trained."""
        return TrainEngineConfig.problems(self)

    def policy_problems(self) -> Problems:
        """Yield the problems with the loss and reward settings of a trained actor."""
        yield from PolicyLossOptions.problems(self)
        if self.use_decoupled_loss and self.recompute_logprob and not self.needs_proximal:
            because = (
                f"with prox_logp_method {self.prox_logp_method}, which needs no forward pass; use only one of them"
            )
            yield "recompute_logprob", f"has no effect {because}"
        if self.kl_ctl == 0:
            yield from ineffective(self, ("kl_estimator",), "with kl_ctl 0; set kl_ctl above 0")
        if self.kl_loss_coef == 0:
            yield from ineffective(self, ("kl_loss_type",), "with kl_loss_coef 0; set kl_loss_coef above 0")
        if any(not key.strip() for key in self.log_agent_stats_keys):
            yield "log_agent_stats_keys", "has an empty key, which names no number; write or remove the key"
        if not self.log_agent_stats:
            yield from ineffective(self, ("log_agent_stats_keys",), "without log_agent_stats; set log_agent_stats too")
        overlong = ("overlong_tokens", "overlong_penalty_factor")
        if not self.overlong_reward_penalty:
            yield from ineffective(self, overlong, "without the penalty; set overlong_reward_penalty too")
            return
        for name in overlong:
            if getattr(self, name) is None:
                yield name, "is missing, but overlong_reward_penalty needs it"
        if self.overlong_tokens is not None and self.overlong_tokens > self.max_new_tokens:
            problem = f"{self.overlong_tokens} is more than max_new_tokens {self.max_new_tokens}; lower overlong_tokens"
            yield "overlong_tokens", problem


@dataclass
class PPOCriticConfig(TrainEngineConfig):
    """The value model."""

    is_critic: bool = setting(True, "A critic returns one number per token.")
    ppo_n_minibatches: int = setting(4, "Optimizer steps per pass over a batch.", minimum=1)
    ppo_n_epochs: int = setting(1, "Passes over a batch, each with ppo_n_minibatches optimizer steps.", minimum=1)
    eps_clip: float = setting(0.5, "Value clipping: clip range of V - V_old, in units of reward.", above=0)
    mask_no_eos_with_zero: bool = setting(
        False,
        "Give no task reward to truncated answers, as for the actor.",
        inherits="actor.mask_no_eos_with_zero",
        shown="actor.mask_no_eos_with_zero",
    )


@dataclass
class DPOEngineConfig(NamedAlgorithm, TrainEngineConfig):
    """A model trained on preference pairs."""

    beta: float = setting(0.1, "Strength of the regularization towards the reference.", above=0)
    loss_type: str = setting(
        "sigmoid",
        "sigmoid is DPO, ipo is IPO with log-probs averaged per token, and hinge is SLiC.",
        choices=("sigmoid", "ipo", "hinge"),
    )
    label_smoothing: float = setting(0.0, "Assumed fraction of flipped preferences.", minimum=0, below=0.5)


@dataclass
class TeacherConfig:
    """A teacher model for on-policy distillation."""

    engine_type: str = setting(
        "rollout",
        "Which section may be set, rollout or train. Nothing else changes: the actor's engine or a server runs the teacher.",
        choices=("rollout", "train"),
    )
    rollout: InferenceEngineConfig | None = section(
        None,
        "Only with engine_type rollout; must agree with the run's other sections.",
        inner={"backend": "rollout.backend", "use_lora": "", "lora_name": ""},
    )
    train: PPOActorConfig | None = section(
        None, "Only with engine_type train; must agree with the run's other sections.", inner={"path": "teacher.path"}
    )
    path: str = setting(
        "", "Teacher: a model folder, a repo id, or the address of a server, such as http://HOST:8000/v1."
    )
    offload: bool = setting(
        False,
        "Move the teacher to host memory between steps.",
        refused="frozen weights stay on the device unless they are sharded; remove the setting, or set "
        "actor.fsdp.offload_params",
    )
    rl_loss_weight: float = setting(1.0, "Weight of the policy loss.", minimum=0)
    distill_loss_weight: float = setting(0.005, "Weight of the distillation loss.", minimum=0)

    def problems(self) -> Problems:
        """Yield the problems within the section."""
        other = "train" if self.engine_type == "rollout" else "rollout"
        if getattr(self, other) is not None:
            yield other, f"has no effect with engine_type {self.engine_type}; remove the setting"
        if not self.path:
            yield "path", "is missing; set the teacher's model folder or repo id"
        if self.rl_loss_weight == self.distill_loss_weight == 0:
            yield (
                "distill_loss_weight",
                "and rl_loss_weight are both 0, so nothing is learned; set at least one weight above 0",
            )
