"""Tables of the settings of TRL and verl, with the equivalent options of ``areno train``.

The settings have the names and meanings of TRL 1.16 and verl 0.9. :mod:`areno.config.conversion` applies the tables;
``docs/coming-from.md`` shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from areno.config.tracking import SERVICES
from areno.config.train_options import KL_TYPES
from areno.errors import UsageError

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """For a setting of another tool, the equivalent option or an explanatory note.

    Attributes:
        option: the equivalent option; empty if no single option is equivalent.
        note: explanation for a setting or a value without an equivalent option.
        value: function that receives the setting's value and all settings, and returns the option's value. Special
            results: True for a flag, which has no value; an empty text if no option is needed; None if the setting's value
            has no equivalent.
        together: whether :mod:`areno.config.conversion` combines the setting with other settings to derive options. In
            this case, ``option`` is empty.
        known: values that are converted; empty means all.
        many: whether the items of a list are converted one by one.
    """

    option: str = ""
    note: str = ""
    value: Callable[[Any, Settings], Any] = field(default=lambda value, _all: value)
    together: bool = False
    known: tuple[str, ...] = ()
    many: bool = False


def _whole(value: Any) -> int:
    return int(float(value))


def text_of(value: Any) -> str:
    """Return ``str(value)``, or ``str`` of the item if ``value`` is a list with one item."""
    return str(value[0] if isinstance(value, list) and len(value) == 1 else value)


def is_on(value: Any) -> bool:
    """Whether an on/off setting is on."""
    return str(value).lower() in ("true", "1", "yes")


def _switch(value: Any, _all: Settings) -> Any:
    return True if is_on(value) else ""


def _positive(value: Any, _all: Settings) -> Any:
    return value if float(value) > 0 else ""


def _off(value: Any, _all: Settings) -> Any:
    return "" if is_on(value) else True


def _above_one(value: Any, _all: Settings) -> Any:
    return value if _whole(value) > 1 else ""


def _no_dropout(value: Any, settings: Settings) -> Any:
    return None if is_on(settings.get("use_peft", False)) and float(value) > 0 else ""


def _if_on(name: str) -> Callable[[Any, Settings], Any]:
    return lambda value, settings: value if is_on(settings.get(name, False)) else ""


def _of_gae(value: Any, settings: Settings) -> Any:
    return value if estimator_of(settings) == "gae" else ""


def _epochs(value: Any, _all: Settings) -> Any:
    epochs = _whole(value)
    return epochs if 1 <= epochs == float(value) else None


def _one_file(value: Any, _all: Settings) -> Any:
    return None if isinstance(value, list) and len(value) > 1 else text_of(value)


def _steps(value: Any, _all: Settings) -> Any:
    steps = float(value)
    return _whole(value) if steps >= 1 else "" if steps == 0 else None


def _optimizer(value: Any, _all: Settings) -> Any:
    name = str(value).removeprefix("paged_")
    if not name.startswith("adamw") or name.endswith("4bit"):
        return None
    return True if name.endswith("8bit") else ""


def _service(value: Any, _all: Settings) -> Any:
    return value if value in SERVICES else ""


def _loss_mean(value: Any, settings: Settings) -> Any:
    if algorithm_of(settings) != "grpo":
        return "" if str(value) in ("token-mean", "seq-mean-token-mean") else None
    means = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "dr_grpo"}
    return means.get(str(value))


def _kl_type(value: Any, settings: Settings) -> Any:
    if not is_on(settings.get(f"{ACTOR}.use_kl_loss", False)):
        return ""
    if str(value) not in KL_TYPES:
        return None
    return value if algorithm_of(settings) == "ppo" or float(settings.get(f"{ACTOR}.kl_loss_coef", 0.001)) else ""


def _strategy(value: Any, settings: Settings) -> Any:
    if not str(value).startswith("fsdp"):
        return None
    return True if count_of(settings, "trainer.n_gpus_per_node", 8) > 1 else ""


def count_of(settings: Settings, name: str, default: int) -> int:
    """Return a setting as an integer. If the setting is missing, return ``default``.

    Raises UsageError if the value is not a whole number above 0. Values such as 8.0 are accepted.
    """
    value = settings.get(name, default)
    with reading(name, value, "a whole number above 0"):
        count = float(value)
        if count < 1 or not count.is_integer():
            raise ValueError
    return int(count)


@contextmanager
def reading(name: str, value: Any, expected: str = "a number") -> Iterator[None]:
    """Context manager for code that reads a setting's value. If the code fails, raise a UsageError that names the setting."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{name}={value}: expected {expected}; correct or remove the setting") from error


_ALWAYS = "always on"
_FRACTION = "areno takes a number of steps, not a fraction of all steps"
_FILES = "areno reads one file, or all files of one folder"
_BY_MEMORY = "free memory determines the size of the KV cache; --kv-cache-tokens sets another size"
_PREPARED = (
    "areno reads the key `prompt` of each row; if your rows have another key, convert the rows with --dataset-loader-fn"
)

DPO_LOSSES = ("sigmoid", "ipo", "hinge")
_TRACKERS = (*SERVICES, "tensorboard", "console", "none")

TRL: dict[str, Rule] = {
    "model_name_or_path": Rule("--ckpt"),
    "dataset_name": Rule("--dataset-path"),
    "dataset_train_split": Rule(
        note="write the split as the last part of a Hub reference: --dataset-path NAME:CONFIG:SPLIT"
    ),
    "output_dir": Rule("--run-dir"),
    "learning_rate": Rule("--lr"),
    "num_train_epochs": Rule(
        "--epochs",
        value=_epochs,
        note="--epochs takes only whole numbers; to end training within an epoch, use --max-steps",
    ),
    "max_steps": Rule("--max-steps", value=_positive),
    "per_device_train_batch_size": Rule(
        together=True,
        note="--mini-bs is this value x devices (for DPO, twice this product, because --mini-bs counts both rows of a pair)",
    ),
    "gradient_accumulation_steps": Rule(
        together=True,
        note="--batch-size is per_device_train_batch_size x gradient_accumulation_steps x devices; for GRPO, divided by "
        "num_generations",
    ),
    "num_generations": Rule("--n-samples"),
    "max_completion_length": Rule("--max-new-tokens"),
    "max_length": Rule("--max-context-len"),
    "temperature": Rule("--temperature"),
    "top_p": Rule("--top-p"),
    "top_k": Rule("--top-k", value=_positive),
    "beta": Rule(together=True, note="--kl-coef, or --dpo-beta for DPO"),
    "num_iterations": Rule("--update-epochs", value=_above_one),
    "epsilon": Rule(together=True, note="--grpo-clip-eps, or --gspo-clip-eps if importance_sampling_level is sequence"),
    "epsilon_high": Rule("--clip-eps-high"),
    "delta": Rule(note="no equivalent: delta bounds the ratio, but --grpo-dual-clip bounds the loss"),
    "importance_sampling_level": Rule(
        together=True, note="--algo gspo if the value is `sequence`, --algo grpo if the value is `token`"
    ),
    "loss_type": Rule(
        together=True,
        note="`grpo`: --grpo-loss-mean sequence; `dapo`, `bnpo`: --grpo-loss-mean token; `dr_grpo`: --grpo-loss-mean dr_grpo; "
        "`cispo`: --algo cispo; `sapo`: --algo sapo; `sigmoid`, `ipo`, `hinge`: --dpo-loss-type",
        known=("grpo", "dapo", "bnpo", "dr_grpo", *DPO_LOSSES),
    ),
    "scale_rewards": Rule(
        "--advantage",
        value=lambda value, _: {"none": "group_mean", "false": "group_mean", "batch": "batch"}.get(
            str(value).lower(), ""
        ),
        known=("group", "true", "none", "false", "batch"),
    ),
    "reward_weights": Rule(note="--reward-weights NAME=WEIGHT,... if the reward function returns named parts"),
    "label_smoothing": Rule("--dpo-label-smoothing"),
    "precompute_ref_log_probs": Rule(note=_ALWAYS),
    "lr_scheduler_type": Rule(
        "--lr-decay-style",
        value=lambda value, _: str(value).removesuffix("_with_warmup"),
        known=("linear", "cosine", "constant", "constant_with_warmup"),
    ),
    "warmup_steps": Rule("--lr-warmup-steps", value=_steps, note=_FRACTION),
    "weight_decay": Rule("--weight-decay"),
    "max_grad_norm": Rule("--grad-clip-norm"),
    "adam_beta1": Rule("--adam-beta1"),
    "adam_beta2": Rule("--adam-beta2"),
    "adam_epsilon": Rule("--adam-eps"),
    "optim": Rule("--adam-8bit", value=_optimizer, note="areno supports only AdamW"),
    "bf16": Rule("--dtype", value=lambda value, _: "bfloat16" if is_on(value) else ""),
    "fp16": Rule(note="use bf16, or an experiment (`areno run`) with actor.dtype float16"),
    "gradient_checkpointing": Rule("--activation-checkpointing", value=_switch),
    "attn_implementation": Rule(
        note="set --attn-backend: `flash` uses FlashAttention if the device supports it, and otherwise PyTorch's kernels; "
        "`native` always uses PyTorch's kernels"
    ),
    "use_peft": Rule(together=True, note="--lora-rank above 0"),
    "lora_r": Rule("--lora-rank", value=_if_on("use_peft")),
    "lora_alpha": Rule("--lora-alpha", value=_if_on("use_peft")),
    "lora_dropout": Rule(
        "--lora-dropout",
        value=_if_on("use_peft"),
        note="supported only for SFT and DPO: rollouts have no dropout, so the importance ratio of GRPO would be noisy",
    ),
    "lora_target_modules": Rule(
        "--lora-target-modules",
        value=lambda value, settings: _if_on("use_peft")(
            value if isinstance(value, str) else ",".join(value), settings
        ),
    ),
    "load_in_4bit": Rule("--load-in-4bit", value=_switch),
    "save_steps": Rule("--save-interval", value=_steps, note=_FRACTION),
    "save_total_limit": Rule("--keep-checkpoints", value=_positive),
    "eval_steps": Rule("--eval-interval", value=_steps, note=_FRACTION),
    "load_best_model_at_end": Rule("--keep-best", value=_switch),
    "seed": Rule("--seed"),
    "report_to": Rule("--track", value=_service, known=_TRACKERS, many=True),
    "resume_from_checkpoint": Rule(note="--resume RUN_DIRECTORY"),
    "logging_steps": Rule(note="every step is logged"),
    "use_vllm": Rule(
        "--rollout-backend",
        value=lambda value, settings: (
            "" if not is_on(value) else "vllm" if settings.get("vllm_mode") == "server" else None
        ),
        note="areno's own engine generates by default; --rollout-backend vllm selects vLLM servers",
    ),
    "vllm_gpu_memory_utilization": Rule(note=_BY_MEMORY),
    "vllm_tensor_parallel_size": Rule("--tp-size", value=_above_one),
    "packing": Rule(note=_ALWAYS),
    "trust_remote_code": Rule("--trust-remote-code", value=_switch),
    "shuffle_dataset": Rule("--no-shuffle", value=_off),
    "mask_truncated_completions": Rule(
        note="in an experiment (`areno run`), actor.mask_no_eos_with_zero excludes truncated answers from training"
    ),
}

OF_GRPO = {"lora_dropout": replace(TRL["lora_dropout"], value=_no_dropout)}
"""Rules for settings of TRL's GRPO trainer. Each rule replaces the rule with the same key in the table ``TRL``."""

ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VERL: dict[str, Rule] = {
    "actor_rollout_ref.model.path": Rule("--ckpt"),
    "data.train_files": Rule("--dataset-path", value=_one_file, note=_FILES),
    "data.val_files": Rule("--eval-dataset-path", value=_one_file, note=_FILES),
    "data.train_batch_size": Rule("--batch-size"),
    "data.max_prompt_length": Rule("--max-prompt-tokens"),
    "data.max_response_length": Rule("--max-new-tokens"),
    "data.shuffle": Rule("--no-shuffle", value=_off),
    "data.prompt_key": Rule(note=_PREPARED),
    "data.filter_overlong_prompts": Rule(note=_ALWAYS),
    "algorithm.adv_estimator": Rule(
        together=True,
        note="--algo grpo for `grpo`, --algo ppo for `gae`, and --algo grpo --advantage rloo for `rloo`",
        known=("grpo", "gae", "rloo", "grpo_vectorized", "rloo_vectorized"),
    ),
    "algorithm.gamma": Rule("--gamma", value=_of_gae),
    "algorithm.lam": Rule("--lam", value=_of_gae),
    "algorithm.norm_adv_by_std_in_grpo": Rule(
        "--advantage",
        value=lambda value, settings: "group_mean" if not is_on(value) and estimator_of(settings) == "grpo" else "",
    ),
    "algorithm.use_kl_in_reward": Rule(together=True, note="--kl-reward-coef above 0"),
    "algorithm.kl_ctrl.kl_coef": Rule(
        "--kl-reward-coef",
        value=_if_on("algorithm.use_kl_in_reward"),
    ),
    f"{ACTOR}.optim.lr": Rule("--lr"),
    f"{ACTOR}.optim.lr_warmup_steps": Rule("--lr-warmup-steps", value=_positive),
    f"{ACTOR}.optim.weight_decay": Rule("--weight-decay"),
    f"{ACTOR}.optim.lr_scheduler_type": Rule("--lr-decay-style", known=("constant", "cosine")),
    f"{ACTOR}.grad_clip": Rule("--grad-clip-norm"),
    f"{ACTOR}.clip_ratio": Rule(
        together=True, note="--grpo-clip-eps for GRPO, --gspo-clip-eps for GSPO, --clip-eps for PPO"
    ),
    f"{ACTOR}.clip_ratio_low": Rule(
        together=True, note="--grpo-clip-eps for GRPO, --gspo-clip-eps for GSPO, --clip-eps for PPO"
    ),
    f"{ACTOR}.policy_loss.loss_mode": Rule(
        together=True,
        note="--algo gspo if the value is `gspo`; the value `vanilla` needs no option",
        known=("vanilla", "gspo"),
    ),
    f"{ACTOR}.clip_ratio_high": Rule("--clip-eps-high"),
    f"{ACTOR}.clip_ratio_c": Rule(note="--clip-ratio-c for PPO, or --grpo-dual-clip for GRPO"),
    f"{ACTOR}.loss_agg_mode": Rule("--grpo-loss-mean", value=_loss_mean),
    f"{ACTOR}.use_kl_loss": Rule(
        together=True, note="for GRPO, --kl-coef above 0; for PPO, on by default, and --no-use-kl-loss turns it off"
    ),
    f"{ACTOR}.kl_loss_coef": Rule(together=True, note="if use_kl_loss is on: --kl-coef, or --kl-loss-coef for PPO"),
    f"{ACTOR}.kl_loss_type": Rule("--kl-loss-type", value=_kl_type),
    f"{ACTOR}.entropy_coeff": Rule(note="no equivalent: areno reports the entropy, but the loss has no entropy term"),
    f"{ACTOR}.ppo_epochs": Rule("--update-epochs", value=_above_one),
    f"{ACTOR}.ppo_mini_batch_size": Rule(
        together=True,
        note="number of prompts per optimizer step; set --update-minibatches to train_batch_size / ppo_mini_batch_size",
    ),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": Rule(
        together=True, note="number of rows in one pass on one GPU; --mini-bs counts the rows on all GPUs"
    ),
    f"{ACTOR}.ppo_max_token_len_per_gpu": Rule(
        note="in an experiment (`areno run`), actor.mb_spec.max_tokens_per_mb limits the tokens per microbatch"
    ),
    f"{ACTOR}.use_dynamic_bsz": Rule(
        note="in an experiment (`areno run`), actor.mb_spec.max_tokens_per_mb limits the tokens that are packed together"
    ),
    f"{ACTOR}.strategy": Rule(
        "--fsdp",
        value=_strategy,
        note="for megatron, use an experiment (`areno run`) with a setting such as actor.backend=megatron:d2t4",
    ),
    f"{ACTOR}.fsdp_config.optimizer_offload": Rule("--offload-optimizer", value=_switch),
    f"{ACTOR}.ulysses_sequence_parallel_size": Rule(
        note="in an experiment (`areno run`), actor.backend=fsdp:d2c4 divides the tokens of each forward pass among c=4 ranks"
    ),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Rule("--activation-checkpointing", value=_switch),
    "actor_rollout_ref.model.use_remove_padding": Rule(note=_ALWAYS),
    "actor_rollout_ref.model.lora_rank": Rule("--lora-rank", value=_positive),
    "actor_rollout_ref.model.lora_alpha": Rule(
        "--lora-alpha",
        value=lambda value, settings: (
            _positive(settings.get("actor_rollout_ref.model.lora_rank", 0), settings) and value
        ),
    ),
    f"{_ROLLOUT}.name": Rule(
        note="areno's own engine generates by default; --rollout-backend selects vllm or sglang servers"
    ),
    f"{_ROLLOUT}.n": Rule("--n-samples"),
    f"{_ROLLOUT}.temperature": Rule("--temperature"),
    f"{_ROLLOUT}.top_p": Rule("--top-p"),
    f"{_ROLLOUT}.top_k": Rule("--top-k", value=_positive),
    f"{_ROLLOUT}.max_num_seqs": Rule("--max-running-prompts"),
    f"{_ROLLOUT}.gpu_memory_utilization": Rule(note=_BY_MEMORY),
    f"{_ROLLOUT}.tensor_model_parallel_size": Rule("--tp-size", value=_above_one),
    f"{_ROLLOUT}.enable_chunked_prefill": Rule(note=_ALWAYS),
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": Rule("--score-micro-bs"),
    "critic.model.path": Rule("--critic-ckpt", value=_of_gae),
    "critic.optim.lr": Rule("--critic-lr", value=_of_gae),
    "trainer.critic_warmup": Rule("--critic-warmup-steps", value=_of_gae),
    "trainer.total_epochs": Rule("--epochs"),
    "trainer.total_training_steps": Rule("--max-steps"),
    "trainer.n_gpus_per_node": Rule("--world-size"),
    "trainer.nnodes": Rule(
        note="for several nodes, write an experiment file and run `areno run FILE.yaml cluster.n_nodes=N`"
    ),
    "trainer.save_freq": Rule("--save-interval", value=_positive),
    "trainer.test_freq": Rule("--eval-interval", value=_positive),
    "trainer.val_before_train": Rule("--no-eval-before-train", value=_off),
    "trainer.default_local_dir": Rule("--run-dir"),
    "trainer.project_name": Rule("--track-project"),
    "trainer.experiment_name": Rule(note="the name of a run is the name of its run directory (--run-dir)"),
    "trainer.logger": Rule("--track", value=_service, known=_TRACKERS, many=True),
    "trainer.resume_mode": Rule(note="--resume RUN_DIRECTORY"),
    "custom_reward_function.path": Rule("--reward-fn-path"),
}


def estimator_of(settings: Settings) -> str:
    """Return the advantage estimator of a verl configuration."""
    return str(settings.get("algorithm.adv_estimator", "gae")).removesuffix("_vectorized")


def algorithm_of(settings: Settings) -> str:
    """Return the value of areno's ``--algo`` that corresponds to a verl configuration."""
    if estimator_of(settings) == "gae":
        return "ppo"
    return "gspo" if settings.get(f"{ACTOR}.policy_loss.loss_mode") == "gspo" else "grpo"
