"""Finds the first step at which two runs differ, and the first phase of this step that differs (see ``PHASES``).

The metrics and the entries of ``samples.index`` show which step differs first. The recorded samples of this step show the
phase. The samples are compared in this order: prompts, log-probs, tokens, rewards, advantages. Log-probs are compared up to the
first token that differs between the runs. If the samples agree, the metrics show the phase. Differences in later phases follow
from the first difference.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from areno.reports.run_data import KEYS, RunData
from areno.reports.run_samples import sample_id
from areno.storage.metric_columns import Series
from areno.storage.sample_index import Entries

RELATIVE = 1e-6
"""Two values of a metric agree if their difference is at most this fraction of the larger absolute value.

Values that differ by at most ``ABSOLUTE`` also agree.
"""
ABSOLUTE = 1e-6
"""Two values of a metric agree if they differ by at most this number, even if the relative difference exceeds ``RELATIVE``.

The number is the size of a rounding error of fp32 log-probs. For learning rates, only ``RELATIVE`` applies.
"""
LOGPROB = 1e-5
"""Log-probs of a token agree if they differ by at most this many nats."""

PHASES = ("prompts", "sampled tokens", "log-probs", "rewards", "advantages", "update", "evaluation")
"""Phases of a step, in order. If metrics of several phases differ between two runs, the first of these phases is reported."""
_METRIC_PHASES = {
    "evaluation": r"^eval|/eval/",
    "prompts": r"prompt_len|skipped_long|num_sequences|n_seqs$|n_prompts|target_tokens",
    "advantages": r"advantage|kl_reward|return_|critic_value_(mean|std|min|max)|ref_logprob",
    "rewards": r"reward|accuracy|zero_std|correct_",
    "log-probs": r"rollout_logprobs|rollout/logprobs|old_logp|sampling_cut_mass",
    "sampled tokens": r"(response|seq)_len|truncated|no_eos|empty_responses|n_(valid_)?tokens|num_turns|agent_|workflow_",
}
# Metrics that depend on the machine or on timing.
_UNCOMPARED = re.compile(
    r"^time/|timeperf/|_time_s$|tokens_per_second|memory|staleness|version_stats|rollout/(accepted|rejected)"
)


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A metric whose values differ. ``relative`` is the difference as a fraction of the larger absolute value."""

    name: str
    values: tuple[float, float]
    relative: float
    phase: str


@dataclass(frozen=True, slots=True)
class StepDifference:
    """A step at which two runs differ, the first phase that differs, and a description of the difference."""

    step: int
    phase: str
    text: str
    metrics: list[ValueDifference] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The extent to which two runs agree.

    Attributes:
        steps: number of steps that both runs recorded.
        last_step: the last step that both runs recorded; -1 if there is none.
        unequal: the first step whose metrics are not bit-equal.
        different: the first step whose metrics differ by more than the tolerance, or whose samples differ.
    """

    steps: int
    last_step: int
    unequal: StepDifference | None
    different: StepDifference | None


class _Pair(NamedTuple):
    """The values of a metric in two runs, at the steps that both runs recorded."""

    steps: np.ndarray
    first: np.ndarray
    second: np.ndarray


def metric_pairs(a: RunData, b: RunData) -> dict[str, tuple[Series, Series]]:
    """Return the two series of each metric that both runs have, keyed by the name of the metric.

    If ``areno train`` started one run and ``areno run`` the other, the metrics have different names. Then only the quantities
    in :data:`~areno.reports.run_data.KEYS` and the reward parts are returned.
    """
    if a.is_experiment == b.is_experiment:
        return {name: (a.metrics[name], b.metrics[name]) for name in a.metrics.names if name in b.metrics}
    pairs = {key: (a.series(key), b.series(key)) for key in KEYS}
    pairs |= part_pairs(a, b)
    return {name: pair for name, pair in pairs.items() if pair[0].steps and pair[1].steps}


def part_pairs(a: RunData, b: RunData) -> dict[str, tuple[Series, Series]]:
    """Return a pair of series for each reward part of the first run: its values in the first run and in the second run.

    If the second run does not have the part, the second series is empty.
    """
    parts = b.reward_parts()
    return {f"reward_parts/{name}": (series, parts.get(name, Series())) for name, series in a.reward_parts().items()}


def common_steps(first: Series, second: Series) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the steps that both series have, and the values of both series at these steps."""
    (steps_a, values_a), (steps_b, values_b) = first.arrays(), second.arrays()
    steps, at_a, at_b = np.intersect1d(steps_a, steps_b, return_indices=True)
    return steps, values_a[at_a], values_b[at_b]


def divergence(a: RunData, b: RunData) -> Divergence:
    """Find the first step at which two runs differ, and the first phase of this step that differs."""
    pairs = {
        name: _Pair(*common_steps(*pair))
        for name, pair in metric_pairs(a, b).items()
        if not (_UNCOMPARED.search(name) or name in ("tokens_per_second", "step_seconds"))
    }
    steps = np.unique(np.concatenate([np.zeros(0, np.int64), *(pair.steps for pair in pairs.values())]))
    unequal = _first(pairs, lambda name, x, y: ~_equal(x, y))
    different = _first(pairs, _differs)
    sampled = _first_sample_step(a.entries, b.entries) if a.is_experiment == b.is_experiment else None
    candidates = [step for step in (different, sampled) if step is not None]
    return Divergence(
        steps=len(steps),
        last_step=int(steps[-1]) if len(steps) else -1,
        unequal=None if unequal is None else _metric_difference(unequal, pairs, lambda name, x, y: ~_equal(x, y)),
        different=_explained(a, b, min(candidates), pairs) if candidates else None,
    )


def _equal(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x == y) | (np.isnan(x) & np.isnan(y))


def _differs(name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    floor = 0.0 if name.rpartition("/")[2] in ("lr", "learning_rate") else ABSOLUTE
    with np.errstate(invalid="ignore"):
        close = np.abs(x - y) <= np.maximum(RELATIVE * np.maximum(np.abs(x), np.abs(y)), floor)
    return ~(_equal(x, y) | close)


_Test = Callable[[str, np.ndarray, np.ndarray], np.ndarray]


def _first(pairs: Mapping[str, _Pair], test: _Test) -> int | None:
    steps = [pair.steps[test(name, pair.first, pair.second)] for name, pair in pairs.items()]
    firsts = [int(each[0]) for each in steps if len(each)]
    return min(firsts) if firsts else None


def _metric_difference(step: int, pairs: Mapping[str, _Pair], test: _Test) -> StepDifference:
    differences = sorted(_at(step, pairs, test), key=lambda each: PHASES.index(each.phase))
    first = differences[0] if differences else None
    text = (
        "" if first is None else f"{first.name} is {_number(first.values[0])} in the first run and "
        f"{_number(first.values[1])} in the second (relative difference {first.relative:.1e})"
    )  # fmt: skip
    return StepDifference(step, "samples" if first is None else first.phase, text, differences)


def _at(step: int, pairs: Mapping[str, _Pair], test: _Test) -> Iterator[ValueDifference]:
    for name, pair in pairs.items():
        index = np.searchsorted(pair.steps, step)
        if index == len(pair.steps) or pair.steps[index] != step:
            continue
        x, y = float(pair.first[index]), float(pair.second[index])
        if test(name, np.array([x]), np.array([y]))[0]:
            scale = max(abs(x), abs(y))
            yield ValueDifference(name, (x, y), abs(x - y) / scale if scale else 0.0, phase_of(name))


def phase_of(metric: str) -> str:
    """Return the phase (one of ``PHASES``) to which a metric belongs."""
    return next((phase for phase, pattern in _METRIC_PHASES.items() if re.search(pattern, metric)), "update")


def _first_sample_step(a: Entries, b: Entries) -> int | None:
    """Return the first step whose samples differ between the ``samples.index`` files of two runs; None if all samples agree.

    These files have the number of tokens, the reward and the advantage of each sample, but no tokens.
    """
    size = min(len(a), len(b))
    if not size:
        return None
    first, second = (e[np.lexsort([e[name] for name in ("sample", "prompt", "step")])[:size]] for e in (a, b))
    same = np.ones(size, bool)
    for name in ("step", "prompt", "sample", "tokens"):
        same &= first[name] == second[name]
    same &= ~_differs("reward", first["reward"], second["reward"])
    # An advantage is a difference from the mean of a group, in 32 bits.
    same &= np.isclose(first["advantage"], second["advantage"], rtol=1e-4, atol=1e-5, equal_nan=True)
    if same.all():
        return None
    index = int(np.argmin(same))
    return int(min(first["step"][index], second["step"][index]))


def _explained(a: RunData, b: RunData, step: int, pairs: Mapping[str, _Pair]) -> StepDifference:
    """Describe the first phase in which a step differs between two runs.

    In general, the phase is the result of :func:`_sample_difference`. In two cases, the phase is instead the first phase whose
    metrics differ:

    - The samples agree, or a run has recorded no samples of the step.
    - The recorded prompts agree, but a metric of the phase ``prompts`` differs, which may be due to prompts that were
      not recorded.
    """
    by_metrics = _metric_difference(step, pairs, _differs)
    samples = _samples(a, step), _samples(b, step)
    by_samples = _sample_difference(*samples, same_order=a.is_experiment == b.is_experiment)
    if by_samples is None:
        if all(samples) and by_metrics.metrics:
            text = f"{by_metrics.text}, although the recorded samples of this step agree"
            if by_metrics.phase == "update":
                text = f"the recorded prompts, tokens, rewards and advantages are the same, but {by_metrics.text}"
            return StepDifference(step, by_metrics.phase, text, by_metrics.metrics)
        return by_metrics
    phase, text = by_samples
    if by_metrics.metrics and PHASES.index(by_metrics.phase) < PHASES.index(phase) and by_metrics.phase == "prompts":
        text = f"the recorded prompts are the same, but {by_metrics.text}"
        return StepDifference(step, by_metrics.phase, text, by_metrics.metrics)
    return StepDifference(step, phase, text, by_metrics.metrics)


class _Flat(NamedTuple):
    """The tokens of a sample, with their log-probs. If the sample has several training rows, these are concatenated.

    ``sampled`` marks the tokens that the model sampled.
    """

    tokens: list[int]
    logprobs: list[float]
    sampled: list[bool]

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.sampled.index(True)] if True in self.sampled else self.tokens


def _flat(sample: Mapping[str, Any]) -> _Flat | None:
    if "rows" not in sample:
        return None
    flat = _Flat([], [], [])
    for row in sample["rows"]:
        for segment in row:
            flat.tokens.extend(segment["tokens"])
            flat.logprobs.extend(map(float, segment["logprobs"]))
            flat.sampled.extend([segment["version"] >= 0 or bool(segment["trained"])] * len(segment["tokens"]))
    return flat


_Samples = dict[tuple[int, int], dict[str, Any]]


def _samples(run: RunData, step: int) -> _Samples:
    entries = run.entries
    chosen = entries[entries["step"] == step]
    return {(int(entry["prompt"]), int(entry["sample"])): run.sample(entry) for entry in chosen}


def _ranked(samples: _Samples) -> _Samples:
    """Renumber the prompts of a step from 0, so that the samples of ``areno train`` and ``areno run`` can be compared.

    The prompt numbers of ``areno run`` continue from step to step.
    """
    ranks = {prompt: rank for rank, prompt in enumerate(sorted({prompt for prompt, _ in samples}))}
    return {(ranks[prompt], sample): record for (prompt, sample), record in samples.items()}


def _sample_difference(a: _Samples, b: _Samples, same_order: bool) -> tuple[str, str] | None:
    """Return the first phase (see ``PHASES``) in which the samples of a step differ, with a description.

    None if the samples agree, or if a run has recorded no samples of the step.
    """
    if not a or not b:
        return None
    if not same_order:
        a, b = _ranked(a), _ranked(b)
    if text := _prompts_differ(a, b):
        return "prompts", text
    common = sorted(a.keys() & b.keys())
    for phase, test in (("log-probs", _logprobs_differ), ("sampled tokens", _tokens_differ)):
        if text := test(a, b, common):
            return phase, text
    for phase, name in (("rewards", "reward"), ("advantages", "advantage")):
        if text := _numbers_differ(a, b, common, name):
            return phase, text
    return None


def _prompts_differ(a: _Samples, b: _Samples) -> str:
    """Describe how the prompts of a step differ. Return "" if they agree."""
    with_tokens = {key for key in a.keys() & b.keys() if "rows" in a[key] and "rows" in b[key]}
    first, second = _prompts(a, with_tokens), _prompts(b, with_tokens)
    if first == second:
        return ""
    if len(first) != len(second) and all(first[key] == second[key] for key in first.keys() & second.keys()):
        return (
            f"the runs recorded different numbers of prompts ({len(first)} and {len(second)}); prompts with the same index are "
            "equal"
        )
    if sorted(map(repr, first.values())) == sorted(map(repr, second.values())):
        return "the prompts are the same, but their order differs"
    index = next(key for key in sorted(first.keys() | second.keys()) if first.get(key) != second.get(key))
    texts = [_text(samples, index) for samples in (a, b)]
    if texts[0] == texts[1]:
        return f"prompt {index} has the same text, but different tokens: the tokenizer or the chat template differs"
    return f"the prompts differ: prompt {index} is {texts[0]} in the first run and {texts[1]} in the second"


def _prompts(samples: _Samples, with_tokens: set[tuple[int, int]]) -> dict[int, Any]:
    prompts: dict[int, Any] = {}
    for key in sorted(samples, key=lambda key: (key not in with_tokens, key)):
        flat = _flat(samples[key]) if key in with_tokens else None
        prompts.setdefault(key[0], samples[key]["prompt"] if flat is None else flat.prompt)
    return prompts


def _text(samples: _Samples, prompt: int) -> str:
    texts = [str(sample["prompt"]) for (index, _), sample in sorted(samples.items()) if index == prompt]
    return f"{texts[0][:80]!r}" if texts else "absent"


def _agreement(x: _Flat, y: _Flat) -> tuple[int, float]:
    """Return the length of the common prefix in tokens, and the largest log-prob difference of its sampled tokens."""
    pairs = zip(x.tokens, y.tokens, strict=False)
    length = next((i for i, (p, q) in enumerate(pairs) if p != q), min(len(x.tokens), len(y.tokens)))
    gaps = [abs(x.logprobs[i] - y.logprobs[i]) for i in range(length) if x.sampled[i] and y.sampled[i]]
    return length, max(gaps, default=0.0)


def _flats(a: _Samples, b: _Samples, common: list[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], _Flat, _Flat]]:
    for key in common:
        first, second = _flat(a[key]), _flat(b[key])
        if first is not None and second is not None:
            yield key, first, second


def _logprobs_differ(a: _Samples, b: _Samples, common: list[tuple[int, int]]) -> str:
    gaps = {key: _agreement(first, second)[1] for key, first, second in _flats(a, b, common)}
    if max(gaps.values(), default=0.0) <= LOGPROB:
        return ""
    key = max(gaps, key=gaps.__getitem__)
    return (
        f"the prompts are the same, but the log-probs of equal tokens differ by up to {gaps[key]:.1e} (sample "
        f"{sample_id(a[key])}); possible causes: weights, dtype, temperature, numerics"
    )


def _tokens_differ(a: _Samples, b: _Samples, common: list[tuple[int, int]]) -> str:
    earliest, count, gap = None, 0, 0.0
    for key, first, second in _flats(a, b, common):
        length, here = _agreement(first, second)
        gap = max(gap, here)
        count += sum(first.sampled[:length])
        position = length - len(first.prompt)
        if length < max(len(first.tokens), len(second.tokens)) and (earliest is None or position < earliest[1]):
            sampled = [flat.sampled[length] for flat in (first, second) if length < len(flat.tokens)]
            earliest = key, position, any(sampled)
    if earliest is not None:
        key, position, sampled_there = earliest
        what = "sampled tokens" if sampled_there else "tokens that were not sampled (tool results, messages)"
        before = (
            "; before the first token that differs in each sample, the log-probs of the sampled tokens "
            f"({count} in total) agree to within {max(gap, 1e-6):.0e}"
            if count
            else ""
        )
        return f"the prompts are the same, but from token {position} of sample {sample_id(a[key])} on, {what} differ{before}"
    for key in common:
        if a[key]["completion"] != b[key]["completion"]:
            return f"the prompts are the same, but sample {sample_id(a[key])} has a different answer"
    return ""


def _numbers_differ(a: _Samples, b: _Samples, common: list[tuple[int, int]], name: str) -> str:
    for key in common:
        x, y = (float("nan") if samples[key].get(name) is None else float(samples[key][name]) for samples in (a, b))
        if not np.isclose(x, y, rtol=RELATIVE if name == "reward" else 1e-4, atol=1e-5, equal_nan=True):
            same = "answers" if name == "reward" else "answers and rewards"
            values = f"{x:.6g} in the first run and {y:.6g} in the second"
            text = f"the {same} are the same, but the {name} of sample {sample_id(a[key])} is {values}"
            return text + (_parts_text(a[key], b[key]) if name == "reward" else "")
    return ""


def _parts_text(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    first, second = a.get("reward_parts") or {}, b.get("reward_parts") or {}
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    return f" ({', '.join(f'{name}: {first.get(name)} and {second.get(name)}' for name in names)})" if names else ""


def _number(value: float) -> str:
    return f"{value:.9g}"
