"""Compares two runs: settings, environment, curves, and the first step that differs, with possible causes.

If ``areno train`` started one run and ``areno run`` the other, only the metrics in ``KEYS``, the reward parts and the settings
in ``COUNTERPARTS`` are compared.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from areno.config.all_train_options import TrainOptions
from areno.config.options import flag_of, options_of
from areno.config.setting_names import SETTINGS
from areno.config.yaml_io import flat
from areno.errors import ArenoError
from areno.reports.divergence import Divergence, common_steps, divergence, part_pairs
from areno.reports.run_data import RunData, describe

CURVES = (
    *("reward", "eval_reward", "eval_loss", "loss", "grad_norm", "entropy", "logprob_gap", "response_length"),
    *("truncated", "learning_rate", "tokens_per_second", "step_seconds"),
)
"""Curves that are compared, by their names in :data:`~areno.reports.run_data.KEYS`."""

# Options whose setting takes the same values; the other options in SETTINGS only serve the same purpose.
_SAME_MEANING = (
    *("eval_dataset_path", "reward_fn_path", "batch_size", "epochs", "max_steps", "n_samples", "max_new_tokens"),
    *("temperature", "top_p", "lr", "grad_clip_norm", "update_epochs", "update_minibatches", "kl_reward_coef"),
    "kl_coef",
)
COUNTERPARTS = {name: SETTINGS[flag_of(name)] for name in _SAME_MEANING} | {
    "seed": "seed",
    "ckpt": "actor.path",
    "dataset_path": "train_dataset.path",
    "shuffle": "train_dataset.shuffle",
    "greedy": "gconfig.greedy",
    "dtype": "actor.dtype",
    "weight_decay": "actor.optimizer.weight_decay",
    "adam_beta1": "actor.optimizer.beta1",
    "adam_beta2": "actor.optimizer.beta2",
    "lr_decay_style": "actor.optimizer.lr_scheduler_type",
    "grpo_clip_eps": "actor.eps_clip",
}
"""Maps options of ``areno train`` to the settings of ``areno run`` with the same meaning."""

# Settings of an experiment that say where and how it runs, what it saves and how it evaluates.
_RUNS_ALIKE = re.compile(
    r"(experiment_name|trial_name|fileroot|setup_timeout|request_timeout|workers_ready_timeout|request_retries|log_level)$"
    r"|^(cluster|saver|recover|stats_logger|perf_tracer|memory_profiler|evaluator|valid_dataset|launcher|scheduler)\."
    r"|scheduling_(spec|strategy)"
)
_MODEL = r"ckpt|(^|\.)path$|dtype|device|attn|lora|world_size|tp_size|fsdp|backend|kernels|4bit|eager|compile"
# Settings that affect each phase; the update, which is not listed, is affected by all settings.
_ACTS_IN = {
    "prompts": r"seed|shuffle|dataset|batch_size|max_prompt|max_sequences|thinking|tokenizer|filter|workflow|ckpt|(^|\.)path$",
    "sampled tokens": rf"seed|n_samples|temperature|top_|greedy|tokens|stop|eos|penalty|context|rollout|gconfig|agent|{_MODEL}",
    "log-probs": rf"temperature|batch|{_MODEL}",
    "rewards": r"reward",
    "advantages": r"algo|advantage|norm|kl_|reward|discount|gamma|lam|gae|overlong|mask_no_eos|whiten|bootstrap|n_samples",
    "evaluation": r"eval|valid",
}
# Properties of the environment without effect on training.
_NO_CAUSE = ("host", "memory_bytes", "data.held_out_examples", "data.held_out_prompts")
_UNSET = "-"
_LARGE = 2**26  # bytes of a file above which contents are not compared


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A setting or a property of the environment that has different values in two runs.

    If several sections have a setting with the same name and the same two values, only one of these settings is listed, and
    ``same`` is the number of settings that are omitted.
    """

    name: str
    values: tuple[Any, Any]
    changes_results: bool
    same: int = 0


@dataclass(frozen=True, slots=True)
class CurveDifference:
    """The values of one metric in two runs, at the steps that both runs recorded.

    ``first``, ``last`` and ``mean`` contain one value per run. ``difference`` is the mean of the second run minus the mean of
    the first run.
    """

    key: str
    names: tuple[str | None, str | None]
    steps: int
    first: tuple[float, float]
    last: tuple[float, float]
    mean: tuple[float, float]
    difference: float


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The differences between two runs."""

    runs: tuple[dict[str, Any], dict[str, Any]]
    settings: list[SettingDifference]
    environment: list[SettingDifference]
    curves: list[CurveDifference]
    divergence: Divergence
    causes: list[SettingDifference]
    """Differences in settings and environment that may have caused the first difference in the results."""

    @property
    def equal(self) -> bool:
        """Whether the two runs agree so far.

        Two runs agree if all of these conditions hold:

        - Both runs have the same last step.
        - No metric or sample differs by more than the tolerance (see :class:`~areno.reports.divergence.Divergence`).
        - No setting that may change results differs.
        """
        decisive = any(setting.changes_results for setting in self.settings)
        lengths = {run["last_step"] for run in self.runs}
        return not decisive and len(lengths) == 1 and self.divergence.different is None

    def as_data(self) -> dict[str, Any]:
        """Return the comparison in JSON types."""
        return {"equal": self.equal, **asdict(self)}


def compare_runs(a: RunData, b: RunData) -> RunComparison:
    """Compare the settings, environments, metrics and samples of two runs."""
    settings, environment = list(_settings(a, b)), list(_environment(a, b))
    result = divergence(a, b)
    return RunComparison(
        runs=(_described(a), _described(b)),
        settings=settings,
        environment=environment,
        curves=[*_curves(a, b)],
        divergence=result,
        causes=_causes(result, settings, environment),
    )


def _described(run: RunData) -> dict[str, Any]:
    return {
        "name": run.name,
        "path": str(run.path),
        "command": "areno run" if run.is_experiment else "areno train",
        "last_step": run.metrics.last_step,
        "state": run.status.get("state", "unknown"),
        "algorithm": describe(run.config)["algo"] or "",
    }


def _settings(a: RunData, b: RunData) -> Iterator[SettingDifference]:
    """Yield the settings that differ between two runs.

    If several sections have a setting with the same name and the same two values (one per run), only one of these settings is
    yielded.
    """
    first, second = dict(flat(a.config)), dict(flat(b.config))
    if a.is_experiment != b.is_experiment:
        options, experiment = (second, first) if a.is_experiment else (first, second)
        shared = {key: name for key, name in COUNTERPARTS.items() if key in options and name in experiment}
        options, experiment = {key: options[key] for key in shared}, {key: experiment[shared[key]] for key in shared}
        first, second = (experiment, options) if a.is_experiment else (options, experiment)
    grouped: dict[tuple[str, str, bool], list[tuple[str, tuple[Any, Any]]]] = {}
    for name in {**first, **second}:
        values = first.get(name, _UNSET), second.get(name, _UNSET)
        if values[0] == values[1] or ("auto" in values and a.is_experiment != b.is_experiment):
            continue
        decisive = _changes_results(name, first, second) and not _same_content(a, b, *values)
        grouped.setdefault((name.rpartition(".")[2], repr(values), decisive), []).append((name, values))
    for (_, _, decisive), places in grouped.items():
        name, values = min(places, key=lambda place: place[0].count("."))
        yield SettingDifference(name, _shortened(*values), decisive, len(places) - 1)


def _changes_results(name: str, *configs: Mapping[str, Any]) -> bool:
    option = next((entry for entry in options_of(TrainOptions) if entry.name == name), None)
    if option is not None:
        return option.info.changes_results
    section = name.partition(".")[0]
    if section in ("sglang", "vllm"):  # settings of servers that may not be used
        return any(str(config.get("rollout.backend", "")).startswith(section) for config in configs)
    return not _RUNS_ALIKE.search(name)


def _same_content(a: RunData, b: RunData, x: Any, y: Any) -> bool:
    """Return whether two values are paths of files with equal content.

    Files that are large or cannot be opened count as different.
    """
    paths = [Path(re.sub(r"(\.py):\w+$", r"\1", value)) for value in (x, y) if isinstance(value, str)]
    if len(paths) < 2 or not all(path.is_absolute() for path in paths):
        return False
    with suppress(OSError, ArenoError):
        if all(path.is_file() and path.stat().st_size <= _LARGE for path in paths):
            with a.files.open(paths[0]) as first, b.files.open(paths[1]) as second:
                pieces = (iter(partial(file.read, 2**16), b"") for file in (first, second))
                return all(one == other for one, other in zip_longest(*pieces))
    return False


def _shortened(x: Any, y: Any) -> tuple[Any, Any]:
    """Make two absolute paths relative to the deepest folder that contains both. Return other values unchanged."""
    if not all(isinstance(value, str) and os.path.isabs(value) for value in (x, y)):
        return x, y
    root = os.path.commonpath([os.path.dirname(x), os.path.dirname(y)])
    return os.path.relpath(x, root), os.path.relpath(y, root)


def _environment(a: RunData, b: RunData) -> Iterator[SettingDifference]:
    first, second = dict(flat(a.environment)), dict(flat(b.environment))
    for name in {**first, **second}:
        values = first.get(name, _UNSET), second.get(name, _UNSET)
        if name != "recorded" and values[0] != values[1]:
            yield SettingDifference(name, values, changes_results=name not in _NO_CAUSE)


def _curves(a: RunData, b: RunData) -> Iterator[CurveDifference]:
    names = {key: (a.metric_of(key), b.metric_of(key)) for key in CURVES}
    pairs = {key: (a.series(key), b.series(key)) for key in CURVES} | part_pairs(a, b)
    for key, pair in pairs.items():
        _, x, y = common_steps(*pair)
        if len(x):
            means = _mean(x), _mean(y)
            first, last = ((float(x[index]), float(y[index])) for index in (0, -1))
            yield CurveDifference(key, names.get(key, (key, key)), len(x), first, last, means, means[1] - means[0])


def _mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")


def _causes(
    result: Divergence, settings: list[SettingDifference], environment: list[SettingDifference]
) -> list[SettingDifference]:
    """Return the differences in settings and environment that may have caused the first difference in the results.

    A setting may be the cause if it affects the phase in which the results first differ. If there is no such setting, but the
    metrics of an earlier step already differed slightly (within the tolerance), the weights may have differed since that step.
    Then any setting that may change results can be the cause. Differences in the environment are returned only for phases that
    the environment can affect: sampled tokens, log-probs and the update.
    """
    if result.different is None:
        return []
    phase, earlier = result.different.phase, result.unequal is not None and result.unequal.step < result.different.step
    decisive = [setting for setting in settings if setting.changes_results]
    causes = [setting for setting in decisive if re.search(_ACTS_IN.get(phase, ""), setting.name)]
    if earlier and not causes:
        causes = decisive
    if phase in ("sampled tokens", "log-probs", "update"):
        causes += [each for each in environment if each.changes_results]
    return causes
