"""The configuration summary that is printed before a run starts. n/a marks options that the run does not use."""

import shutil
import textwrap

from areno.config.algorithms import AlgorithmSpec
from areno.config.all_train_options import TrainOptions
from areno.config.effects import without_effect
from areno.config.machine import runtime_of
from areno.config.options import options_of

_INDENT = 2
_NA = "n/a"


def format_summary(options: TrainOptions, spec: AlgorithmSpec, *, gpus: int = 0, width: int | None = None) -> str:
    """Format the configuration under the title ``AReno training config``.

    ``gpus``, the number of GPUs, determines which device and dtype are shown for ``auto``. Lines are wrapped at ``width``
    columns, by default at the width of the terminal.
    """
    width = max(width or shutil.get_terminal_size((100, 24)).columns, 60)
    sections = {
        "Algorithm": _algorithm(options, spec),
        "Inputs": _inputs(options, spec),
        "Runtime": _runtime(options, gpus),
        "Rollout": _rollout(options, spec),
        "Training": _training(options),
        "Outputs": _outputs(options),
    }
    column = max(len(name) for rows in sections.values() for name in rows) + 2
    lines = ["AReno training config"]
    for title, rows in sections.items():
        lines += ["", title, "-" * len(title)]
        for name, value in rows.items():
            lines += _row(name, value, column, width)
    return "\n".join(lines)


def _row(name: str, value: str, column: int, width: int) -> list[str]:
    head = " " * _INDENT + name.ljust(column)
    return textwrap.wrap(
        value,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [head.rstrip()]


def _algorithm(options: TrainOptions, spec: AlgorithmSpec) -> dict[str, str]:
    rows = {
        "name": spec.name,
        "default_loss": spec.default_loss_name,
        "requires_rollout": "yes" if spec.requires_rollout else "no",
    }
    unused = without_effect(options, spec)
    values = {
        e.name: getattr(options, e.name)
        for e in options_of(TrainOptions)
        if spec.name in e.info.algorithms and e.name not in unused
    }
    return rows | {name: str(value) for name, value in (values | options.extra).items()}


def _inputs(options: TrainOptions, spec: AlgorithmSpec) -> dict[str, str]:
    rollout = spec.requires_rollout
    return {
        "ckpt": str(options.ckpt),
        "dataset_path": str(options.dataset_path),
        "dataset_loader": options.dataset_loader_fn or "none",
        "reward_fn": (options.reward_fn_path or "none") if rollout else _NA,
        "reward_ckpt": (options.reward_ckpt or "none") if rollout else _NA,
        "eval_dataset": options.eval_dataset_path or "none",
        "agent_fn": (options.agent_fn or "none") if rollout else _NA,
        "workflow": (options.workflow or "none") if rollout else _NA,
    }


def _runtime(options: TrainOptions, gpus: int) -> dict[str, str]:
    return runtime_of(options, gpus) | {
        "fsdp": "yes" if options.fsdp else "no",
        "attn_backend": options.attn_backend,
        "thinking": "disabled" if options.disable_thinking else "tokenizer default",
        "seed": str(options.seed),
    }


def _rollout(options: TrainOptions, spec: AlgorithmSpec) -> dict[str, str]:
    rows = {
        "batch_size": str(options.batch_size),
        "max_prompt_tokens": str(options.max_prompt_tokens),
        "max_new_tokens": str(options.max_new_tokens),
        "max_context_len": str(options.max_context_len or "model limit"),
    }
    what = "replicas" if options.rollout_backend == "areno" else f"{options.rollout_backend} servers"
    concurrent = f"{options.rollout_replicas} {what}, staleness at most {options.most_behind}"
    generated = {
        "generation": concurrent if options.uses_replicas else "alternating with training",
        "n_samples": str(options.n_samples),
        "max_running_prompts": str(options.running_sequences),
        "kv_cache_tokens": str(options.kv_cache_tokens or "auto"),
        "sampling": _sampling(options),
        "decode": "eager" if options.eager_decode else "compiled if faster",
        "rollout_state": "dropped after each rollout" if options.drop_rollout_state else "kept",
    }
    return rows | (generated if spec.requires_rollout else dict.fromkeys(generated, _NA))


def _sampling(options: TrainOptions) -> str:
    if options.greedy:
        text = "greedy"
    else:
        top_k = "off" if options.top_k == -1 else str(options.top_k)
        text = f"temperature={options.temperature} top_k={top_k} top_p={options.top_p}"
    ends = [*map(repr, options.stop), *map(str, options.stop_token_ids)]
    return text + (f" stop={', '.join(ends)}" if ends else "") + (" ignore_eos" if options.ignore_eos else "")


def _training(options: TrainOptions) -> dict[str, str]:
    decay = options.lr_decay_style
    if decay != "constant":
        decay += f" to {options.min_lr:g} by step {options.lr_decay_steps}"
    return {
        "trained": _trained(options),
        "epochs": str(options.epochs),
        "max_steps": str(options.max_steps or "no limit"),
        "mini_bs": str(options.mini_bs),
        "gradient_accumulation_steps": str(options.gradient_accumulation_steps or "auto"),
        "activation_checkpointing": {True: "yes", False: "no", None: "auto"}[options.recomputes],
        "optimizer": f"{'8-bit AdamW' if options.adam_8bit else 'AdamW'} lr={options.lr:g} "
        f"({decay}, warmup {options.lr_warmup_steps}) "
        f"betas=({options.adam_beta1:g}, {options.adam_beta2:g}) eps={options.adam_eps:g} "
        f"weight_decay={options.weight_decay:g}",
        "grad_clip_norm": f"{options.grad_clip_norm:g}",
    }


def _trained(options: TrainOptions) -> str:
    if not options.uses_lora:
        return "all weights"
    base = "4-bit weights" if options.load_in_4bit else "frozen weights"
    if options.lora_adapter_path is not None:
        return f"adapter {options.lora_adapter_path} on {base}"
    alpha = 2 * options.lora_rank if options.lora_alpha is None else options.lora_alpha
    return f"adapter of rank {options.lora_rank} (alpha {alpha:g}, {options.lora_target_modules}) on {base}"


def _outputs(options: TrainOptions) -> dict[str, str]:
    minutes = f" and every {options.save_interval_minutes:g} minutes" if options.save_interval_minutes else ""
    return {
        "run_dir": str(options.run_path) + (" (resumed)" if options.resume else ""),
        "save_path": str(options.checkpoint_path),
        "save_interval": f"every {options.save_interval} steps{minutes}, and after the last step",
        "keep_checkpoints": f"newest {options.keep_checkpoints}" if options.keep_checkpoints else "all",
        "metrics_log_dir": str(options.events_path),
    }
