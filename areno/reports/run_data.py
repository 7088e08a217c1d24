"""Reads the files of a run as data, for the report, the viewer and the commands that compare runs.

Runs of ``areno train`` and ``areno run`` are read in the same way. ``KEYS`` maps quantities of a run (reward, loss,
...) to the metric names of both commands.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from areno.config.secrets import without_secrets
from areno.errors import UsageError
from areno.storage.files import Opener, open_file
from areno.storage.log_file import log_part
from areno.storage.metric_columns import MetricColumns, Series
from areno.storage.run_dir import RunDirectory
from areno.storage.run_layout import CONFIG, EXPERIMENT, OPTIONS, is_run
from areno.storage.run_status import read_status
from areno.storage.sample_index import Entries
from areno.types import PARTS

KEYS: dict[str, tuple[str, ...]] = {
    "reward": ("rollout/rewards_mean", "rollout/reward/avg"),
    "reward_min": ("rollout/rewards_min", "rollout/reward/min"),
    "reward_max": ("rollout/rewards_max", "rollout/reward/max"),
    "reward_std": ("rollout/rewards_std",),
    "accuracy": (
        *("train/dpo_accuracy", "train/rm_accuracy", "train/pair_accuracy"),
        *("dpo/reward_accuracy/avg", "rw/correct_ratio/avg"),
    ),
    "chosen_reward": ("train/dpo_chosen_reward", "dpo/chosen_reward/avg"),
    "eval_reward": ("eval/rewards_mean", "eval-rollout/reward/avg"),
    "eval_reward_std": ("eval/rewards_std",),
    "eval_reward_min": ("eval-rollout/reward/min",),
    "eval_reward_max": ("eval-rollout/reward/max",),
    "eval_samples": ("eval/num_samples", "eval-rollout/n_prompts", "eval/num_sequences"),
    "eval_accuracy": ("dpo/eval/reward_accuracy/avg", "rw/eval/correct_ratio/avg", "eval/accuracy"),
    "eval_loss": ("eval/loss", "sft/eval/loss/avg", "dpo/eval/loss/avg", "rw/eval/loss/avg"),
    "loss": ("train/loss", "ppo_actor/update/actor_loss/avg", "sft/loss", "dpo/loss", "rw/loss"),
    "grad_norm": ("train/grad_norm", "ppo_actor/update/grad_norm", "sft/grad_norm", "dpo/grad_norm", "rw/grad_norm"),
    "entropy": ("train/entropy", "ppo_actor/update/entropy/avg"),
    "clip_fraction": ("train/clip_fraction", "ppo_actor/update/clip_ratio/avg"),
    "logprob_gap": ("train/logp_abs_diff_mean", "ppo_actor/update/logp_abs_diff_mean"),
    "staleness": ("train/staleness_mean", "rollout/staleness/avg"),
    "response_length": ("rollout/response_len_mean", "ppo_actor/update/response_len"),
    "truncated": ("train/truncated_ratio", "ppo_actor/no_eos_ratios/avg"),
    "zero_std_groups": ("train/zero_std_groups",),
    "learning_rate": ("train/lr", "ppo_actor/update/lr", "sft/lr", "dpo/lr", "rw/lr"),
    "update_skipped": tuple(f"{scope}/update_skipped" for scope in ("train", "ppo_actor/update", "sft", "dpo", "rw")),
    "loss_scale": tuple(f"{scope}/loss_scale" for scope in ("train", "ppo_actor/update", "sft", "dpo", "rw")),
    "reward_errors": ("train/reward_errors",),
    "samples": ("rollout/num_sequences", "ppo_actor/n_seqs"),
    "tokens_per_second": ("train/tokens_per_second",),
    "step_seconds": ("train/step_wall_time_s", "timeperf/step"),
}
"""Maps each quantity of a run to names of metrics. The first name that the run recorded is used."""
MAX_RUNS = 1000
"""Number of run directories after which a search stops."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # five times faster, if libyaml is installed
_CONFIG_BYTES, _CONFIG_BRACKETS, _CONFIG_VALUES = 2**20, 10_000, 100_000
"""Limits of a configuration: number of bytes, of opening brackets, and of values.

The limit on brackets prevents deep nesting. The limit on values is necessary because YAML aliases multiply values.
"""


class RunData:
    """The files of a run directory as data. The metrics are read immediately, other files when they are needed.

    Args:
        opened: function that opens the files of the run.

    Raises:
        UsageError: the folder is not a run directory.
    """

    def __init__(self, path: str | Path, opened: Opener = open_file) -> None:
        self.files = RunDirectory(path, opened=opened)
        self.path = self.files.path
        if not (is_run(self.path) or self.files.metrics_path.exists() or self.files.status_path.exists()):
            raise UsageError(f"{path} is not a run directory; pass the folder that contains {CONFIG} (runs/<name>)")
        self.metrics = MetricColumns(self.files.metrics_path, opened)

    @property
    def name(self) -> str:
        """Name of the run: the name of its directory."""
        return self.path.resolve().name

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration, without secrets."""
        return read_config(self.files)

    @property
    def is_experiment(self) -> bool:
        """Whether ``areno run`` started the run."""
        return "experiment_name" in self.config

    @property
    def log_path(self) -> Path:
        """The log file."""
        return self.path / (EXPERIMENT if self.is_experiment else OPTIONS).log

    @property
    def status(self) -> dict[str, Any]:
        """The current status; see :func:`areno.storage.run_status.read_status`."""
        return read_status(self.files)

    @property
    def environment(self) -> dict[str, Any]:
        """The content of ``environment.json``: versions, hardware and data sizes; {} if the file is missing or unreadable."""
        return self.files.read_json(self.files.environment_path)

    @property
    def summary(self) -> dict[str, Any]:
        """The summary of a finished run; {} before its end."""
        return self.files.read_json(self.files.summary_path)

    @property
    def warnings(self) -> list[dict[str, Any]]:
        """Health warnings, each with ``step``, ``time`` and ``text``."""
        return list(self.files.read_warnings())

    @property
    def eval_samples(self) -> list[dict[str, Any]]:
        """Answers to the first held-out prompts in each evaluation."""
        return list(self.files.read_eval_samples())

    @property
    def entries(self) -> Entries:
        """Entries of the sample index, one per recorded sample."""
        return self.files.read_entries()

    def sample(self, entry: Any, *, tokens: bool = True) -> dict[str, Any]:
        """Return the recorded sample to which an entry of the sample index refers.

        If ``tokens`` is false, reading is faster, but the record may lack the key ``rows``, which has the tokens.
        """
        return self.files.read_sample(entry, tokens=tokens)

    def series(self, key: str) -> Series:
        """Return the recorded steps and values of ``key``, a quantity in ``KEYS``; empty if the run did not record it."""
        name = self.metric_of(key)
        return Series() if name is None else self.metrics[name]

    def metric_of(self, key: str) -> str | None:
        """Return the name under which the run recorded the quantity ``key`` (a key of ``KEYS``); None if not recorded."""
        return next((name for name in KEYS[key] if name in self.metrics), None)

    def reward_parts(self) -> dict[str, Series]:
        """Return the mean of each reward part in each step, keyed by the name of the part."""
        return self._with_prefix(f"rollout/{PARTS}")

    def phases(self) -> dict[str, Series]:
        """Return the seconds of each phase in each step, keyed by the name of the phase."""
        return self._with_prefix("time/", "timeperf/")

    def log_tail(self) -> list[str]:
        """Return the last complete lines of the log."""
        try:
            with self.files.open(self.log_path) as file:
                return log_part(file).lines
        except OSError:
            return []

    def _with_prefix(self, *prefixes: str) -> dict[str, Series]:
        # Experiments record minimum and maximum too.
        names = (name for name in self.metrics.names if not name.endswith(("/min", "/max")))
        matches = ((name, prefix) for name in names for prefix in prefixes if name.startswith(prefix))
        return {name.removeprefix(prefix).removesuffix("/avg"): self.metrics[name] for name, prefix in matches}


def describe(config: dict[str, Any]) -> dict[str, str | None]:
    """Describe a run by its configuration: its kind (``train`` or ``experiment``), algorithm and model."""
    if "experiment_name" not in config:
        return {"kind": "train", "algo": _text(config.get("algo")), "model": _text(config.get("ckpt"))}
    actor, rows = (value if isinstance(value := config.get(name), dict) else {} for name in ("actor", "train_dataset"))
    algorithm = actor.get("algorithm") or ("ppo" if config.get("critic") else rows.get("type"))
    return {"kind": "experiment", "algo": _text(algorithm), "model": _text(actor.get("path"))}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def read_config(run: RunDirectory) -> dict[str, Any]:
    """Return the configuration of a run, without secrets.

    {} if the file is missing, cannot be read, or is too large.
    """
    try:
        with run.open(run.config_path) as file:
            content = file.read(_CONFIG_BYTES + 1)
        text = content.decode() if len(content) <= _CONFIG_BYTES else ""
        loaded = yaml.load(text, Loader=_LOADER) if text.count("[") + text.count("{") <= _CONFIG_BRACKETS else None
        if not isinstance(loaded, dict) or _count(loaded, {}) > _CONFIG_VALUES:
            return {}
        return dict(without_secrets(loaded))
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError, yaml.YAMLError):
        return {}  # a tag such as `!!int` raises one of several errors for an invalid value


def _count(value: Any, counts: dict[int, int]) -> int:
    """Return the number of values in a nested value. If a YAML alias repeats a value, all parts of the value count again.

    If a value contains itself, the result exceeds ``_CONFIG_VALUES``, so that :func:`read_config` rejects the configuration.
    """
    if not isinstance(value, dict | list | tuple):
        return 1
    if id(value) not in counts:
        counts[id(value)] = _CONFIG_VALUES + 1
        items = value.values() if isinstance(value, dict) else value
        counts[id(value)] = 1 + sum(_count(item, counts) for item in items)
    return counts[id(value)]


def find_runs(folder: Path, limit: int = MAX_RUNS) -> Iterator[Path]:
    """Yield the run directories at or below ``folder``, at most four levels deep.

    A run may be a symbolic link. Other links to folders are not followed, because they may lead anywhere or form a
    cycle.
    """
    pending = [(folder, 0)]
    while pending and limit:
        path, depth = pending.pop()
        if is_run(path):
            limit -= 1
            yield path
        elif depth < 4 and (depth == 0 or not os.path.islink(path)):
            with suppress(OSError):  # a folder of another user
                children = [child for child in sorted(path.iterdir(), reverse=True) if os.path.isdir(child)]
                pending += [(child, depth + 1) for child in children]
