"""Run directories in the format of real runs, with curves and samples chosen by a test."""

from __future__ import annotations

import html.parser
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from areno.storage.run_dir import RunDirectory

OPTIONS = {
    "algo": "grpo",
    "epochs": 1,
    "max_steps": None,
    "batch_size": 8,
    "n_samples": 4,
    "max_new_tokens": 256,
    "lr": 0.001,
    "grad_clip_norm": 1.0,
    "kl_coef": 0.0,
}
SETTINGS = {
    "experiment_name": "arithmetic",
    "total_train_epochs": 1,
    "gconfig": {"n_samples": 4, "max_new_tokens": 256},
    "actor": {"optimizer": {"lr": 0.001}},
    "recover": {"mode": "auto"},
}
FINISHED = {"state": "finished", "pid": 1, "host": "here", "started": 1_750_000_000.0, "ended": 1_750_000_600.0}
WORDS = ["count", "carry", "ten", "sum", "digit", "first", "then", "add", "result", "so", "we", "and", "is", "minus"]


def prose(rng: np.random.Generator, length: int = 30) -> str:
    """Text without repetition."""
    return " ".join(f"{WORDS[number % len(WORDS)]}{number}" for number in rng.integers(10_000, size=length))


def sample(step: int, index: int, number: int, reward: float, **fields: Any) -> dict[str, Any]:
    """A record of ``samples.jsonl``."""
    return {
        **{"step": step, "prompt_index": index, "sample_index": number, "picked": fields.pop("picked", ["first"])},
        **{"reward": reward, "advantage": 0.0, "finish_reason": "stop", "response_len": 30, "logprob_mean": -1.0},
        **{"prompt": f"What is {step} plus {index}?", "completion": f"It is {step + index}."},
        **fields,
    }


def row(tokens: list[str], advantage: float, **fields: Any) -> list[list[dict[str, Any]]]:
    """The training rows of a sample: one row with a prompt of one token and an answer."""
    count = len(tokens)
    prompt = {"role": "user", "turn": 0, "trained": False, "version": -1, "tokens": [7], "texts": ["Why? "]}
    answer = {"role": "text", "turn": 0, "trained": True, "version": 3, "tokens": [*range(count)], "texts": tokens}
    prompt |= {"logprobs": [0.0], "advantages": [0.0]}
    answer |= {"logprobs": [-0.5] * count, "advantages": [advantage] * count, **fields}
    return [[prompt, answer]]


@dataclass
class Prepared:
    """A run to write: ``metrics`` has columns of equal length, ``evaluations`` has records by number of completed steps."""

    metrics: Mapping[str, Iterable[float]]
    config: dict[str, Any] = field(default_factory=lambda: dict(OPTIONS))
    evaluations: Mapping[int, dict[str, float]] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, Any] | None = field(default_factory=lambda: dict(FINISHED))
    summary: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> RunDirectory:
        """Write the run."""
        run = RunDirectory(path).create()
        run.write_config(yaml.safe_dump(self.config))
        columns = {name: list(values) for name, values in self.metrics.items()}
        count = len(next(iter(columns.values()), []))
        with open(run.metrics_path, "w", encoding="utf-8") as file:
            for step in range(count + 1):
                if step in self.evaluations:
                    file.write(line(step, self.evaluations[step]))
                if step < count:
                    file.write(line(step, {name: values[step] for name, values in columns.items()}))
        run.append_samples(self.samples)
        if self.status is not None:
            run.write_status(self.status)
        if self.summary:
            run.write_summary(self.summary)
        return run


def line(step: int, values: Mapping[str, float]) -> str:
    """A line of ``metrics.jsonl``."""
    safe = {name: float(value) if np.isfinite(value) else "NaN" for name, value in values.items()}
    return json.dumps({"step": step, "time": 1_750_000_000.0 + 6 * step, **safe}) + "\n"


def curve(rng: np.random.Generator, steps: int, start: float, end: float, noise: float = 0.03) -> np.ndarray:
    """A curve from ``start`` to ``end`` with white noise."""
    return np.linspace(start, end, steps) + rng.normal(0, noise, steps)


def policy_metrics(rng: np.random.Generator, steps: int, **columns: Any) -> dict[str, np.ndarray]:
    """The metrics of a healthy RL run whose reward rises; ``columns`` override them by name, ``reward`` the mean reward."""
    reward = columns.pop("reward", curve(rng, steps, 0.2, 0.8))
    metrics = {
        "rollout/rewards_mean": reward,
        "rollout/rewards_std": np.full(steps, 0.4),
        "rollout/rewards_min": np.zeros(steps),
        "rollout/rewards_max": np.ones(steps),
        "rollout/num_sequences": np.full(steps, 32.0),
        "rollout/response_len_mean": curve(rng, steps, 60, 70, 3),
        "train/loss": rng.normal(0, 1e-3, steps),
        "train/grad_norm": curve(rng, steps, 0.5, 0.4, 0.05),
        "train/entropy": curve(rng, steps, 1.2, 0.8, 0.02),
        "train/clip_fraction": np.full(steps, 0.02),
        "train/logp_abs_diff_mean": np.full(steps, 1e-3),
        "train/truncated_ratio": np.full(steps, 0.03),
        "train/zero_std_groups": np.full(steps, 0.2),
        "train/update_skipped": np.zeros(steps),
        "train/reward_errors": np.zeros(steps),
        "train/lr": np.full(steps, 1e-3),
        "train/step_wall_time_s": np.full(steps, 5.0),
        "time/rollout": np.full(steps, 3.0),
        "time/reward": np.full(steps, 0.5),
        "time/train": np.full(steps, 1.0),
    }
    assert columns.keys() <= metrics.keys(), columns.keys() - metrics.keys()
    return metrics | columns


def prompt_samples(
    rng: np.random.Generator, steps: int, best_fields: Callable[[int, int], dict[str, Any]] = lambda step, prompt: {}
) -> list[dict[str, Any]]:
    """Three samples for each of four prompts per step; ``best_fields`` returns fields of the best one."""
    records = []
    for step in range(steps):
        for prompt in range(4):
            records.append(sample(step, prompt, 0, 0.2, completion=prose(rng)))
            best = {"completion": prose(rng), **best_fields(step, prompt)}
            records.append(sample(step, prompt, 1, best.pop("reward", 1.0), picked=["best"], **best))
            records.append(sample(step, prompt, 2, 0.0, picked=["worst"], completion=prose(rng)))
    return records


@dataclass
class Element:
    """An element of a page."""

    tag: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text below it."""
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def all(self, tag: str = "", **attributes: str) -> list[Element]:
        """All descendants with this tag and with these words in their attributes (``class_`` for class)."""
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        matches = []
        for child in self.children:
            if isinstance(child, Element):
                words = {name: child.attributes.get(name, "").split() for name in wanted}
                if tag in ("", child.tag) and all(value in words[name] for name, value in wanted.items()):
                    matches.append(child)
                matches += child.all(tag, **attributes)
        return matches

    def one(self, tag: str = "", **attributes: str) -> Element:
        """The only such descendant."""
        (match,) = self.all(tag, **attributes)
        return match


class Page(html.parser.HTMLParser):
    """A parsed page; asserts that its tags are balanced."""

    VOID = ("meta", "br", "link", "img", "input", "hr")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.root = Element("", {})
        self._open = [self.root]
        self.feed(source)
        self.close()
        assert self._open == [self.root], f"unclosed: {[element.tag for element in self._open]}"

    def handle_starttag(self, tag, attrs):
        element = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(element)
        if tag not in self.VOID:
            self._open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag):
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data):
        self._open[-1].children.append(data)
