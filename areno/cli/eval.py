"""``areno eval``: evaluates a model on held-out prompts, and prints accuracy, pass@k and lengths."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from areno.config.eval_options import EvalOptions, parse_eval
from areno.config.paths import is_address
from areno.config.prepare import load_hooks
from areno.errors import ArenoError
from areno.observability.logs import route_console, setup_logging
from areno.types import RewardRecord, parts_of

logger = logging.getLogger(__name__)


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    options = parse_eval(argv)
    settings = options.as_train_options()
    loader_fn = load_hooks(settings)
    evaluate: Callable[..., dict[str, float]]
    if is_address(options.ckpt):
        from areno.api.server_evaluation import evaluate_server

        evaluate = partial(evaluate_server, str(options.ckpt), options.model)
    else:
        from areno.api.run_training import run_evaluation

        evaluate = run_evaluation
    answers = AnswerFile(options.output) if options.output else None
    with setup_logging(None), EvalProgress(options.n_samples, answers) as progress:
        metrics = evaluate(settings, loader_fn=loader_fn, on_start=progress.start, on_scored=progress.scored)
    print(_as_json(options, metrics) if options.json else _as_table(options, metrics))
    return 0


class EvalProgress:
    """Shows the progress of an evaluation: a bar on a terminal, log lines elsewhere.

    If there is an :class:`AnswerFile`, the answers are also written to this file.
    """

    def __init__(self, n_samples: int, answers: AnswerFile | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._n_samples, self._answers = n_samples, answers
        self._total = self._prompts = self._rewarded = 0
        self._sum, self._started = 0.0, time.monotonic()
        console = Console(file=sys.stderr)
        self._live = sys.stderr.isatty() and console.is_interactive
        columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, disable=not self._live)
        self._task = self._bar.add_task("prompts", total=None)

    def __enter__(self) -> EvalProgress:
        return self

    def __exit__(self, *_: object) -> None:
        route_console(None)
        self._bar.stop()

    def start(self, rows: int) -> None:
        """Start the progress display. ``rows`` is the number of prompts, including prompts that are too long."""
        self._total, self._started = rows, time.monotonic()
        self._bar.update(self._task, total=rows)
        self._bar.start()
        if self._live:
            route_console(lambda line: self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True))

    def scored(self, records: list[RewardRecord], rewards: list[float | None]) -> None:
        """Update the progress, and write the answers to the answer file. A reward is None if the reward function failed."""
        if self._answers is not None:
            self._answers.append(records, rewards)
        valid = [reward for reward in rewards if reward is not None]
        self._sum, self._rewarded = self._sum + sum(valid), self._rewarded + len(valid)
        self._prompts += len(records) // self._n_samples
        mean = self._sum / max(self._rewarded, 1)
        self._bar.update(self._task, completed=self._prompts, description=f"prompts, mean reward {mean:.3f}")
        if not self._live:
            seconds_per_prompt = (time.monotonic() - self._started) / self._prompts
            eta = seconds_per_prompt * (self._total - self._prompts)
            logger.info("prompt %d/%d reward=%.6f ETA %.0f s", self._prompts, self._total, mean, eta)


class AnswerFile:
    """JSONL file of answers with their rewards. The first call of :meth:`append` overwrites an existing file."""

    def __init__(self, path: str) -> None:
        self._path, self._mode = Path(path).expanduser(), "wb"
        self._write("ab", b"")  # an error is reported before the evaluation

    def append(self, records: Sequence[RewardRecord], rewards: Sequence[float | None]) -> None:
        """Append answers with their rewards; the reward is None if the reward function failed."""
        lines = "".join(_line(record, reward) for record, reward in zip(records, rewards, strict=True))
        self._write(self._mode, lines.encode(errors="backslashreplace"))
        self._mode = "ab"

    def _write(self, mode: str, data: bytes) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, mode) as file:
                file.write(data)
        except OSError as error:
            raise ArenoError(
                f"--output {self._path} cannot be written: {error.strerror or error}; choose another file"
            ) from error


def _line(record: RewardRecord, reward: float | None) -> str:
    values = {
        **record.metadata,
        "reward": reward,
        **({"reward_parts": dict(parts)} if (parts := parts_of(reward)) else {}),
        "response_len": record.metadata.get("response_len", len(record.tokens)),
        "prompt": record.prompt,
        "completion": record.completion,
        "answer": record.answer,
    }
    return json.dumps(values, ensure_ascii=False, default=str) + "\n"


def _as_json(options: EvalOptions, metrics: Mapping[str, float]) -> str:
    names = ("ckpt", "dataset_path", "n_samples", "seed")
    values: dict[str, Any] = {name: getattr(options, name) for name in names}
    return json.dumps(values | {"metrics": dict(metrics)})


def _as_table(options: EvalOptions, metrics: Mapping[str, float]) -> str:
    width = max(map(len, metrics))
    lines = [f"{name:<{width}}  {value:.6g}" for name, value in metrics.items()]
    if options.output is not None:
        lines.append(f"{'answers':<{width}}  {options.output}")
    return "\n".join([f"{options.ckpt} on {options.dataset_path}", "", *lines])
