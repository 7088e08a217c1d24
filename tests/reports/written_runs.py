"""Small run directories with known numbers, in the format of real runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from areno.storage.run_dir import RunDirectory

Record = dict[str, Any]
CONFIG: Record = {"algo": "grpo", "seed": 0, "lr": 0.1, "shuffle": True, "save_interval": 100}
ENVIRONMENT: Record = {"areno": "0.1.0", "cores": 2, "gpus": [], "packages": {"torch": "2.13.0"}, "recorded": 1.0}


def metrics_of(step: int) -> Record:
    """The metrics of a step, different for each step."""
    return {
        "rollout/prompt_len_mean": 3.0,
        "rollout/response_len_mean": 4.0,
        "rollout/logprobs_mean": -1.5 - step / 100,
        "rollout/rewards_mean": step / 8,
        "rollout/reward_parts/short": step / 16,
        "train/loss": 0.25 / (1 + step),
        "train/grad_norm": 2.0 + step,
        "train/lr": 0.1,
        "train/tokens_per_second": 1000.0 + step,
        "time/rollout": 0.5 + step,
    }


def samples_of(step: int) -> Iterator[Record]:
    """Two samples for each of two prompts, each with three prompt tokens and four sampled ones."""
    for prompt in (0, 1):
        for sample in (0, 1):
            tokens = [100 * prompt + 10 * sample + step + position for position in range(4)]
            advantage = sample - 0.5
            context = {"role": "user", "turn": 0, "trained": False, "version": -1, "tokens": [1, 2, 7 + prompt]}
            sampled = {"role": "text", "turn": 0, "trained": True, "version": step, "tokens": tokens}
            rows = [
                {**context, "texts": list("abc"), "logprobs": [0.0] * 3, "advantages": [0.0] * 3},
                {**sampled, "texts": list("wxyz"), "logprobs": [-1.0, -1.5, -2.0, -2.5], "advantages": [advantage] * 4},
            ]
            yield {
                "step": step,
                "prompt_index": prompt,
                "sample_index": sample,
                "picked": ["first"],
                "reward": float(sample),
                "reward_parts": {"short": float(sample)},
                "advantage": advantage,
                "finish_reason": "stop",
                "response_len": 4,
                "logprob_mean": -1.75,
                "prompt": f"Question {prompt}",
                "completion": f"Answer {step}/{prompt}/{sample}",
                "rows": [rows],
            }


def write_run(
    path: Path,
    *,
    steps: int = 4,
    config: Record | None = None,
    environment: Record | None = None,
    metrics: Callable[[int, Record], Record] = lambda step, record: record,
    samples: Callable[[Record], Record] | None = lambda record: record,
) -> Path:
    """Write a run; ``metrics`` and ``samples`` change what is recorded; if ``samples`` is None, no samples are."""
    run = RunDirectory(path).create()
    run.write_config(yaml.safe_dump({**CONFIG, **(config or {})}))
    run.write_environment({**ENVIRONMENT, **(environment or {})})
    for step in range(steps):
        run.append_metrics(step, metrics(step, metrics_of(step)))
        if samples is not None:
            run.append_samples([samples(record) for record in samples_of(step)])
    return path
