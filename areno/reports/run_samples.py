"""Selects samples of a run to show or to check.

The selection uses ``samples.index``, so that only the selected samples are read from ``samples.jsonl``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areno.reports.run_data import RunData
from areno.reports.trends import window
from areno.storage.sample_index import FLAGS

CHECKED = 64
"""Default maximum number of samples that :meth:`RunSamples.spread` selects."""
COMPARED = 400
"""Recurring prompts are searched among the first ``COMPARED`` and the last ``COMPARED`` prompts of a run.

If a step has several answers to a prompt, the prompt counts once.
"""

Indices = NDArray[np.int64]


def sample_id(sample: Any) -> str:
    """Return the ID ``STEP/PROMPT/SAMPLE`` of a record of ``samples.jsonl`` or of an entry of ``samples.index``.

    ``areno inspect`` accepts the ID.
    """
    names = ("step", "prompt_index", "sample_index") if isinstance(sample, dict) else ("step", "prompt", "sample")
    return "/".join(str(sample[name]) for name in names)


class RunSamples:
    """The recorded samples of a run. A sample is identified by the position of its entry in the sample index."""

    def __init__(self, run: RunData) -> None:
        self._run = run
        self.entries = run.entries
        self._texts: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self.entries)

    @cached_property
    def steps(self) -> NDArray[np.int64]:
        """Step of each sample."""
        return self.entries["step"].astype(np.int64)

    @cached_property
    def rewards(self) -> NDArray[np.float64]:
        """Reward of each sample."""
        return np.array(self.entries["reward"])

    @cached_property
    def early(self) -> Indices:
        """Samples of the first steps; :func:`~areno.reports.trends.window` determines the number of steps."""
        return np.flatnonzero(self.steps < self.steps[0] + self._width) if len(self) else np.zeros(0, np.int64)

    @cached_property
    def late(self) -> Indices:
        """Samples of the last steps; :func:`~areno.reports.trends.window` determines the number of steps."""
        return np.flatnonzero(self.steps > self.steps[-1] - self._width) if len(self) else np.zeros(0, np.int64)

    @property
    def _width(self) -> int:
        return max(window(int(self.steps[-1] - self.steps[0]) + 1), 1)

    def flagged(self, flag: str, among: Indices) -> Indices:
        """Return the samples in ``among`` that have the flag ``flag``, which is a key of ``FLAGS``."""
        return among[(self.entries["flags"][among] & FLAGS[flag]) > 0]

    def extremes(self, count: int, *, highest: bool, among: Indices | None = None) -> list[int]:
        """Return the samples with the highest or the lowest reward.

        If rewards are equal, samples with recorded tokens come before samples without recorded tokens, and newer samples before
        older samples.
        """
        among = np.arange(len(self)) if among is None else among
        among = among[np.isfinite(self.rewards[among])]
        keys = self.rewards[among] * (1 if highest else -1)
        has_rows = (self.entries["flags"][among] & FLAGS["rows"]) > 0
        if len(among) > count:  # sorting a million samples, most of them equal, would take a second
            last = np.partition(keys, -count)[-count]
            ties = [np.flatnonzero((keys == last) & (has_rows == flag))[-count:] for flag in (False, True)]
            kept = np.concatenate([np.flatnonzero(keys > last), *ties])
            among, keys, has_rows = among[kept], keys[kept], has_rows[kept]
        return [int(index) for index in among[np.lexsort((among, has_rows, keys))][::-1][:count]]

    def spread(self, among: Indices, count: int = CHECKED) -> list[int]:
        """Return at most ``count`` samples, evenly spaced within ``among``."""
        return (
            [int(index) for index in among[np.unique(np.linspace(0, len(among) - 1, count).astype(int))]]
            if len(among)
            else []
        )

    def texts(self, index: int) -> dict[str, Any]:
        """Return the record of a sample. Its tokens (``rows``) may be missing; to read them, call :meth:`record`."""
        if index not in self._texts:
            self._texts[index] = self._run.sample(self.entries[index], tokens=False)
        return self._texts[index]

    def record(self, index: int) -> dict[str, Any]:
        """Return the record of a sample."""
        return self._run.sample(self.entries[index])

    def ids(self, indices: Iterable[int] | Indices) -> tuple[str, ...]:
        """Return the IDs of samples."""
        return tuple(sample_id(self.entries[index]) for index in indices)

    def position(self, name: str) -> int | None:
        """Return the position of the sample whose ID (see :func:`sample_id`) is ``name``; None if there is no such sample."""
        step, prompt, sample = map(int, name.split("/"))
        first, end = np.searchsorted(self.steps, [step, step + 1])
        entries = self.entries[first:end]
        matches = np.flatnonzero((entries["prompt"] == prompt) & (entries["sample"] == sample))
        return int(first + matches[0]) if len(matches) else None

    def tied(self, among: Indices) -> tuple[float, Indices]:
        """Return the fraction of groups whose answers all have the same reward, and the first sample of each of these groups.

        Only recorded answers are compared. They include the best and the worst answer of each group. A group with one recorded
        answer counts as tied.
        """
        if not len(among):
            return 0.0, among
        keys = self.steps[among] << 32 | self.entries["prompt"][among].astype(np.int64)
        order = np.argsort(keys, kind="stable")
        starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
        rewards = self.rewards[among][order]
        tied = np.minimum.reduceat(rewards, starts) == np.maximum.reduceat(rewards, starts)
        return float(tied.mean()), among[order][starts][tied]

    @cached_property
    def _by_prompt(self) -> dict[str, list[int]]:
        first = self.flagged("first", np.arange(len(self)))
        prompts: dict[str, list[int]] = {}
        for index in dict.fromkeys(map(int, [*first[:COMPARED], *first[-COMPARED:]])):
            prompts.setdefault(str(self.texts(index).get("prompt")), []).append(index)
        return prompts

    def includes_prompt(self, text: object) -> bool:
        """Return whether one of the first or last samples of the run has this prompt."""
        return str(text) in self._by_prompt

    @property
    def prompts(self) -> tuple[int, int]:
        """Number of prompts, and number of distinct prompts.

        Only the prompts at the start and at the end of the run are counted (see ``COMPARED``). In the first number, a prompt
        counts once for each step that sampled it.
        """
        return sum(map(len, self._by_prompt.values())), len(self._by_prompt)

    @cached_property
    def recurring(self) -> list[tuple[int, int]]:
        """Pairs of answers to the same prompt, one pair for each prompt that was sampled in several steps.

        A pair contains an answer from the first of these steps and an answer from the last of these steps.
        """
        return [(same[0], same[-1]) for same in self._by_prompt.values() if self.steps[same[0]] < self.steps[same[-1]]]

    def changes(self, count: int) -> list[tuple[int, int]]:
        """Return pairs of answers to the same prompt (see :attr:`recurring`): the ``count`` pairs whose rewards differ most.

        Pairs with equal rewards are omitted.
        """
        sizes = {(a, b): abs(self.rewards[b] - self.rewards[a]) for a, b in self.recurring}
        return sorted((pair for pair, size in sizes.items() if size > 0), key=lambda pair: -sizes[pair])[:count]


def distinct_share(text: str) -> float:
    """Return which fraction of the four-character sequences of a text are distinct; 1 if the text is too short.

    Only the end of a long text is examined.
    """
    text = re.sub(r"\s+", " ", text)[-1000:]
    pieces = [text[start : start + 4] for start in range(len(text) - 3)]
    return len(set(pieces)) / len(pieces) if len(text) >= 40 else 1.0


def completions(samples: RunSamples, indices: Sequence[int]) -> list[str]:
    """Return the answers of samples."""
    return [str(samples.texts(index).get("completion", "")) for index in indices]
