"""Options of the groups Train and LoRA: weight updates, losses and adapters."""

from dataclasses import dataclass
from functools import partial

from areno.config.options import option
from areno.config.paths import adapter_config

KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""Estimators of the KL term in the loss."""

ALL_LINEAR = "all-linear"
"""Value of ``--lora-target-modules`` that selects all linear layers except the output head."""

_train = partial(option, group="Train")
_train_free = partial(_train, changes_results=False)
_ppo = partial(option, group="Train", algorithms=("ppo",))
_dpo = partial(option, group="Train", algorithms=("dpo",))
_groups = partial(option, group="Train", algorithms=("gspo", "grpo"))
_policy = partial(option, group="Train", algorithms=("gspo", "grpo", "ppo"))
_lora = partial(option, group="LoRA")


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """Microbatches, the optimizer, and the losses of the algorithms."""

    mini_bs: int = _train(
        16, minimum=1, help="Microbatch size: number of rows in one forward and backward pass, over all devices."
    )
    gradient_accumulation_steps: int | None = _train(
        None, minimum=1, unset="all microbatches of a step", help="Microbatches per optimizer step."
    )
    activation_checkpointing: bool = _train(
        True,
        documented_default="on if memory is short or the memory use cannot be estimated, else off",
        help="Recompute activations in the backward pass. Recomputation saves memory but takes time.",
    )
    tree_training: bool = _train(
        True,
        algorithms=("dpo", "gspo", "grpo", "ppo", "sft"),
        help="Compute a prefix only once if several rows of a microbatch share this prefix, such as a prompt. "
        "Results are the same up to rounding errors.",
    )
    offload_activations: bool = _train_free(
        False, help="Keep the inputs of recomputed layers in host memory until the backward pass (GPU only)."
    )
    lr: float = _train(1e-6, above=0, help="Learning rate.")
    min_lr: float = _train(1e-7, minimum=0, help="Learning rate at the end of the decay.")
    lr_warmup_steps: int = _train(0, minimum=0, help="Optimizer steps of linear warmup from 0.")
    lr_decay_steps: int = _train(1000, minimum=1, help="Optimizer step at which the learning rate reaches --min-lr.")
    lr_decay_style: str = _train(
        "cosine", choices=("constant", "linear", "cosine"), help="Shape of the learning-rate decay."
    )
    adam_beta1: float = _train(0.9, minimum=0, below=1, help="AdamW decay rate of the first moment.")
    adam_beta2: float = _train(0.999, minimum=0, below=1, help="AdamW decay rate of the second moment.")
    adam_eps: float = _train(1e-8, above=0, help="AdamW epsilon, which is added to the denominator.")
    adam_8bit: bool = _train(
        False,
        help="Store AdamW's two moments in 8 bits each. A weight's moments then take about two bytes instead of eight.",
    )
    offload_optimizer: bool = _train_free(
        False,
        help="For training on a GPU: keep optimizer states and accumulated gradients in host memory, and update the weights "
        "on the CPU.",
    )
    weight_decay: float = _train(0.01, minimum=0, help="Decoupled weight decay.")
    grad_clip_norm: float = _train(1.0, above=0, help="Clip gradients to this global norm.")
    score_micro_bs: int = _train_free(
        8,
        minimum=1,
        algorithms=("dpo", "gspo", "grpo", "ppo", "rm"),
        help="Rows per forward pass of a reference, critic or reward model.",
    )
    update_epochs: int = _policy(1, minimum=1, help="Training passes over the samples of one rollout.")
    update_minibatches: int = _policy(
        1,
        minimum=1,
        help="Optimizer steps per training pass. Each step uses a different subset of the prompts.",
    )
    ref_ckpt: str | None = _train(
        None,
        path="place",
        algorithms=("dpo", "gspo", "grpo", "ppo"),
        unset="--ckpt",
        help="Reference model of the KL term or of DPO: a folder or a repo id.",
    )
    critic_ckpt: str | None = _ppo(None, path="place", unset="--ckpt", help="Initial critic: a folder or a repo id.")
    critic_lr: float = _ppo(1e-5, above=0, help="Learning rate of the critic.")
    critic_min_lr: float = _ppo(0.0, minimum=0, help="Learning rate of the critic at the end of the decay.")
    critic_lr_warmup_steps: int = _ppo(0, minimum=0, help="Optimizer steps of the critic's linear warmup from 0.")
    critic_lr_decay_steps: int = _ppo(
        1000, minimum=1, help="Optimizer step at which the critic's learning rate reaches --critic-min-lr."
    )
    critic_lr_decay_style: str = _ppo(
        "constant", choices=("constant", "linear", "cosine"), help="Shape of the critic's learning-rate decay."
    )
    critic_grad_clip_norm: float = _ppo(1.0, above=0, help="Clip the critic's gradients to this global norm.")
    critic_warmup_steps: int = _ppo(
        20, minimum=0, help="Number of steps that train only the critic, before the first policy update."
    )
    gspo_clip_eps: float = _train(
        3e-4, above=0, algorithms=("gspo",), help="Clip range of the importance ratio of a sequence."
    )
    grpo_clip_eps: float = _train(
        0.2, above=0, algorithms=("grpo",), help="Clip range of the importance ratio of a token."
    )
    clip_eps_high: float | None = _policy(
        None,
        above=0,
        unset="same as the lower clip range",
        help="Upper clip range (clip-higher). A value above the lower clip range lets the probability of unlikely "
        "tokens rise further.",
    )
    grpo_dual_clip: float | None = _train(
        None,
        above=1,
        algorithms=("grpo",),
        unset="no bound",
        help="Dual clip: limit the loss of a token with negative advantage to this multiple of the advantage's "
        "magnitude.",
    )
    grpo_loss_mean: str = _train(
        "token",
        algorithms=("grpo",),
        choices=("token", "sequence", "dr_grpo"),
        help="Aggregation of the loss: mean over all tokens (token), mean of the answers' means (sequence), or "
        "mean of the answers' sums divided by --max-new-tokens (dr_grpo).",
    )
    advantage: str = _groups(
        "group",
        path="python",
        metavar="NAME|FILE.PY:FUNCTION",
        help="How rewards become advantages: group, group_mean, rloo, batch, or your own function.",
    )
    kl_coef: float = _groups(
        0.0,
        minimum=0,
        help="Weight of the KL term in the loss. The KL term measures the divergence from the reference model. With 0, "
        "there is no KL term.",
    )
    dpo_beta: float = _dpo(0.1, above=0, help="Beta of DPO. A larger value keeps the policy closer to the reference.")
    dpo_loss_type: str = _dpo(
        "sigmoid",
        choices=("sigmoid", "ipo", "hinge"),
        help="Preference loss: sigmoid (DPO), ipo (IPO) or hinge (SLiC).",
    )
    dpo_label_smoothing: float = _dpo(
        0.0, minimum=0, below=0.5, help="Assumed fraction of pairs whose preference label is wrong."
    )
    dpo_length_normalized: bool = _dpo(
        False, help="Compare answers by their mean log-prob per token instead of the sum."
    )
    use_kl_loss: bool = _ppo(True, help="Add a KL term to the loss: the divergence from the reference model.")
    kl_loss_coef: float = _ppo(0.001, minimum=0, help="Weight of the KL term in the loss.")
    kl_loss_type: str = _policy("low_var_kl", choices=KL_TYPES, help="Estimator of the KL term in the loss.")
    kl_reward_coef: float = _policy(
        0.0,
        minimum=0,
        help="Weight of the KL penalty that is subtracted from the reward of each token. The penalty measures the "
        "divergence from the reference. With 0, there is no penalty.",
    )
    kl_reward_type: str = _policy("k1", choices=("k1", "k2", "k3"), help="Estimator of the KL penalty in the reward.")
    clip_eps: float = _ppo(0.2, above=0, help="Clip range of the importance ratio of a token.")
    clip_ratio_c: float = _ppo(
        3.0,
        above=1,
        help="Dual clip: limit the loss of a token with negative advantage to this multiple of the advantage's "
        "magnitude.",
    )
    value_clip_eps: float = _ppo(
        0.5,
        above=0,
        help="In the value loss, clip each predicted value to at most this distance from the value predicted before the "
        "update. The distance has the unit of rewards.",
    )
    value_loss_coef: float = _ppo(0.5, above=0, help="Weight of the value loss.")
    bootstrap_truncated: bool = _ppo(
        True,
        help="For truncated answers, use the critic's value after the last token as the return of the missing tokens. "
        "Disable this option if most answers are truncated, because the critic's values would otherwise grow without bound.",
    )
    whiten_advantages: bool = _ppo(True, help="Whiten the advantages over all tokens of a step.")
    gamma: float = _ppo(1.0, minimum=0, maximum=1, help="Discount factor of rewards.")
    lam: float = _ppo(
        0.95,
        minimum=0,
        maximum=1,
        help="GAE lambda. A larger value lowers the bias of the advantages, but raises their variance.",
    )

    def takes_reference(self, ppo: bool) -> bool:
        """Whether rows need log-probs of the reference model.

        The KL term in the loss is enabled by ``use_kl_loss`` if ``ppo`` is true, and by ``kl_coef`` above 0 otherwise.
        """
        return self.kl_reward_coef > 0 or (self.use_kl_loss if ppo else self.kl_coef > 0)


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """LoRA adapters."""

    lora_rank: int = _lora(
        0,
        minimum=0,
        help="Train a LoRA adapter of this rank and freeze the model's weights. With 0, all weights are trained.",
    )
    lora_alpha: float | None = _lora(
        None,
        above=0,
        unset="twice --lora-rank",
        help="Alpha of the adapter, whose output is scaled by alpha / rank.",
    )
    lora_dropout: float = _lora(
        0.0,
        minimum=0,
        below=1,
        help="Dropout on the adapter's inputs in training. Only algorithms without rollouts support dropout, "
        "because dropout would make the importance ratio noisy.",
    )
    lora_target_modules: str = _lora(
        ALL_LINEAR,
        metavar="NAME[,NAME...]",
        help="Linear layers that get an adapter, given by the last part of their names, such as q_proj. The value "
        "all-linear means all linear layers except the output head.",
    )
    lora_adapter_path: str | None = _lora(
        None,
        path="place",
        metavar="PATH",
        unset="a new adapter",
        help="Start from this PEFT adapter of the model at --ckpt. The adapter determines the rank, alpha and layers.",
    )
    load_in_4bit: bool = _lora(
        False,
        help="Store the frozen weights in 4 bits with bitsandbytes (QLoRA: nf4 with double quantization).",
    )

    @property
    def uses_lora(self) -> bool:
        """Whether an adapter is trained."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None

    @property
    def adapter_rank(self) -> int | None:
        """Rank of the trained adapter; None without an adapter."""
        if self.lora_rank or self.lora_adapter_path is None:
            return self.lora_rank or None
        return int(adapter_config(self.lora_adapter_path).get("r", 8))  # 8: peft's default
