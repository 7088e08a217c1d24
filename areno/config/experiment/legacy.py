"""Translates the keys of AReaL's early command line, ``main_async_ppo.py key=value ...``, to a `PPOConfig`.

Any setting of `PPOConfig` is accepted as a key too.
"""

import re
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from areno.config.experiment.build import ALIASES, nearest_path
from areno.config.experiment.experiments import PPOConfig
from areno.config.experiment.loader import config_from, parse_cli_args
from areno.config.experiment.setting_declaration import Setting, paths_of
from areno.config.experiment.tree import Override, Tree, apply_override, leaves, parse_override, read_yaml
from areno.config.experiment.worker_sections import DEFAULT_FILEROOT
from areno.config.options import did_you_mean
from areno.config.parser import Problems
from areno.errors import UsageError


class LegacyKey(NamedTuple):
    """A legacy key.

    Attributes:
        path: path of the `PPOConfig` setting that receives the value.
        help: text for ``--help``.
        shown: the default value, as ``--help`` prints it.
    """

    path: str
    help: str
    shown: str


LEGACY_KEYS: dict[str, LegacyKey] = {
    "experiment_name": LegacyKey(
        "experiment_name", "Name of the experiment, without the characters _ and /.", "async-ppo or sync-ppo"
    ),
    "trial_name": LegacyKey("trial_name", "Name of the trial, without the characters - and /.", "current time"),
    "n_nodes": LegacyKey("cluster.n_nodes", "Number of machines.", "1"),
    "n_gpus_per_node": LegacyKey(
        "cluster.n_gpus_per_node", "Number of devices per machine.", "all devices of the machine"
    ),
    "allocation_mode": LegacyKey(
        "allocation_mode",
        "Parallel sizes of generation (before the +) and training, such as `areno.d1m1+d1m1`. d, m and p are the data-, "
        "tensor- and pipeline-parallel sizes.",
        "areno.d1m1+d1m1",
    ),
    "cluster.fileroot": LegacyKey("cluster.fileroot", "Root folder of logs and checkpoints.", DEFAULT_FILEROOT),
    "actor.type._class": LegacyKey("actor.model_type", "Model family of the actor, such as qwen3.", "any"),
    "ref.type._class": LegacyKey("ref.model_type", "Model family of the reference.", "any"),
    "critic.type._class": LegacyKey("critic.model_type", "Model family of the critic.", "any"),
    "actor.path": LegacyKey("actor.path", "Model folder or repo id of the actor.", "required"),
    "ref.path": LegacyKey(
        "ref.path",
        "Model folder or repo id of the reference. Without a reference, there is no KL term.",
        "no reference",
    ),
    "dataset.path": LegacyKey("train_dataset.path", "JSONL file with the dataset.", "required"),
    "dataset.train_bs_n_seqs": LegacyKey("train_dataset.batch_size", "Number of prompts per training step.", "1"),
    "group_size": LegacyKey("gconfig.n_samples", "Number of answers per prompt.", "1"),
    "max_concurrent_rollouts": LegacyKey(
        "rollout.max_concurrent_rollouts",
        "Maximum number of prompts whose answers are generated concurrently.",
        "dataset.train_bs_n_seqs",
    ),
    "max_head_offpolicyness": LegacyKey(
        "rollout.max_head_offpolicyness",
        "Maximum number of batches by which generation may be ahead of training. With 0, training is synchronous.",
        "0",
    ),
    "actor_train.mb_spec.max_tokens_per_mb": LegacyKey(
        "actor.mb_spec.max_tokens_per_mb",
        "Maximum number of tokens in a microbatch when the actor is trained.",
        "no limit",
    ),
    "actor_inf.mb_spec.max_tokens_per_mb": LegacyKey(
        "actor.mb_spec.max_tokens_per_mb",
        "Maximum number of tokens in a microbatch when the actor computes log-probs. The smaller of this "
        "limit and the training limit applies.",
        "no limit",
    ),
    "ref_inf.mb_spec.max_tokens_per_mb": LegacyKey(
        "ref.mb_spec.max_tokens_per_mb",
        "Maximum number of tokens in a microbatch when the reference computes log-probs.",
        "no limit",
    ),
    "ppo.gen.max_new_tokens": LegacyKey("gconfig.max_new_tokens", "Maximum number of tokens in an answer.", "16384"),
    "ppo.ppo_n_minibatches": LegacyKey(
        "actor.ppo_n_minibatches", "Number of optimizer steps per pass over a batch.", "4"
    ),
    "ppo.recompute_logprob": LegacyKey(
        "actor.recompute_logprob",
        "Before training on a batch, recompute its log-probs with the current weights.",
        "true if training is asynchronous or ppo.use_decoupled_loss=true, else false",
    ),
    "ppo.use_decoupled_loss": LegacyKey(
        "actor.use_decoupled_loss",
        "Use the decoupled PPO loss.",
        "same as ppo.recompute_logprob",
    ),
    "ppo.adv_norm": LegacyKey("actor.adv_norm", "Normalize advantages over the batch.", "true"),
    "group_adv_norm": LegacyKey(
        "actor.adv_norm", "Normalize advantages within each group instead of over the batch.", "false"
    ),
    "success_rate_ub": LegacyKey(
        "success_rate_ub", "Filter out prompts whose success rate is above this value.", "no bound"
    ),
    "success_rate_lb": LegacyKey(
        "success_rate_lb", "Filter out prompts whose success rate is below this value.", "no bound"
    ),
    "exp_ctrl.total_train_epochs": LegacyKey("total_train_epochs", "Number of passes over the dataset.", "1"),
    "exp_ctrl.save_freq_epochs": LegacyKey("saver.freq_epochs", "Save a model every N epochs.", "null"),
    "exp_ctrl.save_freq_steps": LegacyKey("saver.freq_steps", "Save a model every N steps.", "null"),
    "exp_ctrl.save_freq_secs": LegacyKey("saver.freq_secs", "Save a model every N seconds.", "null"),
    "exp_ctrl.ckpt_freq_epochs": LegacyKey(
        "recover.freq_epochs", "Write a recovery checkpoint every N epochs.", "null"
    ),
    "exp_ctrl.ckpt_freq_steps": LegacyKey("recover.freq_steps", "Write a recovery checkpoint every N steps.", "null"),
    "exp_ctrl.ckpt_freq_secs": LegacyKey("recover.freq_secs", "Write a recovery checkpoint every N seconds.", "null"),
    "wandb.mode": LegacyKey("stats_logger.wandb.mode", "Mode of Weights & Biases. true means online.", "disabled"),
    "tensorboard.path": LegacyKey(
        "stats_logger.tensorboard.path", "Folder of TensorBoard's event files.", "the run directory"
    ),
}
"""Legacy keys, each with the setting that receives its value."""

_SWITCHES = ("ppo.adv_norm", "group_adv_norm")  # booleans that map to a section
_LEARNING_RATE = 2e-5
_UPPER = 5.0


def load_legacy_config(argv: Sequence[str], *, asynchronous: bool, clock: Callable[[], float] = time.time) -> PPOConfig:
    """Load the configuration from the command line of ``main_async_ppo.py`` or ``main_sync_ppo.py``.

    Args:
        argv: arguments ``key=value``, with or without the program's name. ``--config FILE`` adds the keys in a YAML file.
        asynchronous: True for ``main_async_ppo.py``.
        clock: function that returns the Unix time in seconds, for the default name of the trial.

    Raises:
        UsageError: the configuration is invalid.
        SystemExit: with code 0 after ``--help``.
    """
    args = parse_cli_args(argv)
    if args.help:
        sys.stdout.write(render_legacy_help(asynchronous=asynchronous))
        raise SystemExit(0)
    keys = legacy_keys(read_yaml(args.config_file) if args.config_file else {}, args.overrides)
    return config_from(translate(keys, asynchronous=asynchronous, now=clock()), PPOConfig)


def legacy_keys(tree: Tree, overrides: Sequence[str]) -> dict[str, Any]:
    """Merge the keys of a file with those of the command line, which take precedence, and return the value of each key.

    Raises UsageError if an override is malformed, or if a key is neither a legacy key nor a setting of PPOConfig.
    """
    problems = Problems()
    keys = {path: value for path, value in leaves(tree) if not isinstance(value, dict)}
    settings = paths_of(PPOConfig)
    for text in overrides:
        try:
            override = parse_override(text, PPOConfig)
        except UsageError as error:
            problems.add(str(error))
            continue
        keys.pop(override.path, None)
        if not override.delete:
            keys[override.path] = override.value
    for path in keys:
        if path not in LEGACY_KEYS and not _is_setting(path, settings):
            hint = did_you_mean(nearest_path(path, [*LEGACY_KEYS, *settings]))
            problems.add(f"{path} is neither a key that --help lists nor a setting of PPOConfig{hint}")
    problems.raise_if_any()
    return keys


def _is_setting(path: str, settings: Mapping[str, Setting]) -> bool:
    """Whether ``path`` is a setting, or a key in a setting that accepts any key, such as ``workflow.kwargs.max_turns``."""
    name = re.sub(r"\.\d+(?=\.|$)", ".0", ALIASES.get(path, path))
    parts = name.split(".")
    parents = [settings.get(".".join(parts[:end])) for end in range(1, len(parts))]
    return name in settings or any(entry is not None and entry.shape == "dict" for entry in parents)


def translate(keys: dict[str, Any], *, asynchronous: bool, now: float) -> Tree:
    """Translate legacy keys to a tree of `PPOConfig` settings. Raises UsageError if two keys contradict each other."""
    _check_keys(keys)
    tree = _defaults(keys, asynchronous=asynchronous, now=now)
    for name in sorted(keys, key=lambda name: name not in LEGACY_KEYS):  # settings of PPOConfig come last
        if name in _SWITCHES:
            continue
        path = LEGACY_KEYS[name].path if name in LEGACY_KEYS else ALIASES.get(name, name)
        apply_override(tree, Override(path, _smaller(name, keys)))
    return tree


def _smaller(name: str, keys: dict[str, Any]) -> Any:
    """Return the value of the legacy key ``name``.

    The keys ``actor_train.mb_spec.max_tokens_per_mb`` and ``actor_inf.mb_spec.max_tokens_per_mb`` set the same setting. For
    these two keys, return the smaller of their values.
    """
    pair = [keys.get(f"actor_{which}.mb_spec.max_tokens_per_mb") for which in ("train", "inf")]
    limits = [limit for limit in pair if limit is not None]
    numbers = limits and all(isinstance(limit, int) for limit in limits)  # otherwise the value is reported as invalid
    return min(limits) if name.startswith("actor_") and numbers else keys[name]


def _check_keys(keys: dict[str, Any]) -> None:
    if keys.get("ppo.recompute_logprob") is False and keys.get("ppo.use_decoupled_loss") is True:
        raise UsageError(
            "ppo.use_decoupled_loss=true needs log-probs from before the update, but ppo.recompute_logprob is false; remove "
            "one of the two keys"
        )
    unused = [name for name in ("ref.type._class", "ref_inf.mb_spec.max_tokens_per_mb") if keys.get(name) is not None]
    if unused and not keys.get("ref.path"):
        raise UsageError(f"{unused[0]} has no effect without a reference; set ref.path too, or remove the key")
    if keys.get("group_adv_norm") is True and keys.get("ppo.adv_norm") is False:
        raise UsageError("group_adv_norm=true and ppo.adv_norm=false contradict each other; remove one of the two keys")
    for name in _SWITCHES:
        if not isinstance(keys.get(name, False), bool):
            raise UsageError(f"{name} {keys[name]!r}: expected true or false")


def _defaults(keys: dict[str, Any], *, asynchronous: bool, now: float) -> Tree:
    recompute = keys.get("ppo.recompute_logprob", keys.get("ppo.use_decoupled_loss") is True or asynchronous)
    decoupled = keys.get("ppo.use_decoupled_loss", recompute)
    in_groups = keys.get("group_adv_norm", False)
    level = "group" if in_groups else "batch"
    actor: Tree = {
        "recompute_logprob": recompute,
        "use_decoupled_loss": decoupled,
        "rejection_sampling": {"upper": _UPPER} if decoupled else None,
        "optimizer": {"lr": _LEARNING_RATE},
        "adv_norm": {"mean_level": level, "std_level": level} if in_groups or keys.get("ppo.adv_norm", True) else None,
    }
    tree: Tree = {
        "experiment_name": "async-ppo" if asynchronous else "sync-ppo",
        "trial_name": time.strftime("%Y%m%dT%H%M%S", time.gmtime(now)),
        "train_dataset": {"type": "rl"},
        "actor": actor,
    }
    if not any(name in keys for name in ("allocation_mode", "actor.backend", "rollout.backend")):
        tree["allocation_mode"] = "areno.d1m1+d1m1"
    if any(keys.get(f"exp_ctrl.ckpt_freq_{unit}") is not None for unit in ("epochs", "steps", "secs")):
        tree["recover"] = {"mode": "auto"}
    if any(name.startswith("critic.") for name in keys):
        tree["critic"] = {"optimizer": {"lr": _LEARNING_RATE}}
    return tree


def render_legacy_help(*, asynchronous: bool) -> str:
    """Format the help on legacy keys, with a final newline."""
    program = "main_async_ppo.py" if asynchronous else "main_sync_ppo.py"
    lines = [f"usage: {program} [--config FILE.yaml] key=value ...", ""]
    for name, key in LEGACY_KEYS.items():
        lines.append(f"  {name} = {key.shown}")
        lines += textwrap.wrap(key.help, 110, initial_indent="      ", subsequent_indent="      ")
    lines += [
        "",
        "Any setting of PPOConfig is accepted too, such as actor.optimizer.lr=1e-5 or gconfig.temperature=0.8.",
    ]
    return "\n".join(lines) + "\n"
