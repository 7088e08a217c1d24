"""What every side of ``rollout.py`` shares: its settings, its prompts, its clock and the one shape of its result.

A side hands :func:`measure` one function, which generates for all prompts once. Prompts are drawn anew for each pass, so
that a prefix cache helps within a pass and never across passes. Only the standard library is used, because sides run in
environments of their own.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
Samples = list[tuple[list[int], list[float]]]  # tokens and their log-probs; prompt by prompt, sample by sample

# How long idle OpenMP threads spin: what areno sets for itself, and the fastest found for the others too.
SPIN = {"GOMP_SPINCOUNT": "1000000"}


@dataclass(frozen=True)
class Settings:
    """One workload as one side gets it.

    Attributes:
        model: checkpoint folder.
        device: ``cpu`` or ``cuda``.
        dtype: ``float32`` or ``bfloat16``.
        threads: CPU threads to compute with.
        prompts: tokens of each prompt.
        samples: samples per prompt.
        lengths: new tokens of each sample, prompt by prompt; equal within a prompt.
        prompt_ids: prompts are drawn from the ids 2 to this one.
        prompt_file: JSON with the prompts of each pass, from pass -1 on; they are taken from it instead, and ``prompts`` has
            the most tokens of each.
        passes: timed passes after the first.
        options: of this side alone.
    """

    model: str
    device: str
    dtype: str
    threads: int
    prompts: list[int]
    samples: int
    lengths: list[int]
    prompt_ids: int
    passes: int
    prompt_file: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def context(self) -> int:
        """Most tokens of one sequence."""
        return max(self.prompts) + max(self.lengths)

    def draw(self, number: int) -> Prompts:
        """The prompts of one pass, the same for every side; -1 is a trial before the first."""
        if self.prompt_file:
            return json.loads(Path(self.prompt_file).read_text())[number + 1]
        rng = random.Random(number)
        return [[rng.randrange(2, self.prompt_ids) for _ in range(count)] for count in self.prompts]

    def prompt_lengths(self) -> list[int]:
        """New tokens of the samples of each prompt."""
        return self.lengths[:: self.samples]


def settings() -> Settings:
    """From the command line."""
    return Settings(**json.loads(sys.argv[1]))


def measure(
    given: Settings,
    one_pass: Callable[[Prompts, int], Samples],
    *,
    how: str,
    load_s: float,
    load_compile_s: float = 0.0,
) -> None:
    """Time ``passes + 1`` passes, check what they return, and print the result as the last line.

    Args:
        given: the workload.
        one_pass: prompts and the number of the pass to samples.
        how: versions and settings of this side, for the reader of the result.
        load_s: seconds until the engine stood, compiling excluded; reported, counted nowhere.
        load_compile_s: seconds of that which went into compiling.
    """
    seconds, tokens, total = [], 0, 0.0
    for number in range(given.passes + 1):
        prompts = given.draw(number)
        began = time.perf_counter()
        samples = one_pass(prompts, number)
        seconds.append(time.perf_counter() - began)
        tokens, total = check(given, samples)
    warm = statistics.median(seconds[1:])
    result = {
        "how": how,
        "load_s": load_s,
        "first_pass_s": seconds[0],
        "seconds": seconds[1:],
        "compile_s": load_compile_s + max(seconds[0] - warm, 0.0),
        "tokens": tokens,
        "mean_logprob": total / tokens,
        "peak_mib": peak_mib(),
    }
    print(json.dumps(result), flush=True)


def fastest_threads(given: Settings, work: Callable[[], Any], set_threads: Callable[[int], Any]) -> int:
    """Sets the number of threads, one or all, with which ``work`` is faster; the better of three tries each counts."""
    best: dict[int, float] = {}
    for threads in (given.threads, 1):
        set_threads(threads)
        work()  # sets up what depends on the number of threads
        for _ in range(3):
            began = time.perf_counter()
            work()
            best[threads] = min(best.get(threads, math.inf), time.perf_counter() - began)
    fastest = min(best, key=lambda threads: best[threads])
    set_threads(fastest)
    return fastest


def check(given: Settings, samples: Samples) -> tuple[int, float]:
    """Number of tokens and sum of log-probs, after every sample was found complete."""
    counts = [len(tokens) for tokens, _ in samples]
    assert counts == given.lengths, f"wrong numbers of tokens: {counts[:8]}, not {given.lengths[:8]}"
    for tokens, logprobs in samples:
        assert len(logprobs) == len(tokens), f"{len(logprobs)} log-probs for {len(tokens)} tokens"
        assert all(math.isfinite(value) and value < 1e-4 for value in logprobs), "a log-prob is not one"
    return sum(counts), sum(sum(logprobs) for _, logprobs in samples)


def peak_mib() -> float:
    """Largest resident sets of this process and of those that it started and that still run, summed."""
    children: dict[int, list[int]] = {}
    peaks: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            lines = (folder / "status").read_text().splitlines()
        except OSError:  # ended meanwhile
            continue
        status = dict(line.split(":", 1) for line in lines if ":" in line)
        children.setdefault(int(status["PPid"]), []).append(int(folder.name))
        peaks[int(folder.name)] = int(status.get("VmHWM", "0 kB").split()[0])
    total, left = 0, [os.getpid()]
    while left:
        process = left.pop()
        total += peaks.get(process, 0)
        left += children.get(process, [])
    return total / 1024
