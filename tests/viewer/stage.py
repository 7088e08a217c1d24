"""Shared by tests of the viewer: run directories written by the real writers, and the real server in a thread."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from areno.storage.run_dir import RunDirectory
from areno.viewer.server import ViewerServer

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\'"><svg onload=window.hacked=1>'
CONFIG = "algo: grpo\nckpt: /models/tiny\nlr: 0.001\nseed: 0\nnested:\n  depth: 2\n  names: [a, b]\n"


def write_run(path: Path, steps: int = 20, config: str = CONFIG, prompts: int = 3) -> RunDirectory:
    """A run with rising rewards, two evaluations, warnings, a log, and three samples for each prompt of each step."""
    run = RunDirectory(path).create()
    run.write_config(config)
    run.write_status({"state": "finished", "started": 1_700_000_000.0, "ended": 1_700_000_100.0})
    run.write_environment({"cores": 2, "packages": {"torch": "2.11"}, "recorded": 5.0})
    for step in range(steps):
        run.append_metrics(step, metrics_of(step))
        run.append_samples(sample for prompt in range(prompts) for sample in samples_of(step, prompt))
    for step in (0, steps):
        run.append_metrics(step, {"eval/rewards_mean": step / 100})
        run.append_eval_samples(
            {
                "step": step,
                "prompt_index": index,
                "reward": step + index,
                "prompt": f"Q{index}",
                "completion": f"A{step}",
            }
            for index in range(3)
        )
    run.append_warning(3, "step 3: the reward is flat; try easier prompts")
    run.log_path.write_text("".join(f"2026-01-01 00:00:00,000 INFO areno: line {n}\n" for n in range(3000)))
    return run


def metrics_of(step: int) -> dict[str, float]:
    return {
        "rollout/rewards_mean": 0.25 + step / 64,
        "train/loss": math.nan if step == 7 else -0.125 * step,
        "train/staleness_mean": step % 3,
        "time/rollout": 1.5,
    }


def samples_of(step: int, prompt: int) -> list[dict[str, Any]]:
    reward = {"worst": -1.0, "first": 0.125 * step, "best": 2.0 + prompt}
    return [
        {
            "step": step,
            "prompt_index": prompt,
            "sample_index": index,
            "picked": [why],
            "reward": reward[why],
            "reward_parts": {"format": 1.0},
            "advantage": 0.5 * (index - 1),
            "finish_reason": "length" if (step + index) % 4 == 0 else "stop",
            "response_len": 3 + step % 5,
            "logprob_mean": -0.5,
            "prompt": f"What is {step} plus {prompt}?",
            "completion": f"It is {step + prompt}.\nStraße {index}",
            "rows": [segments_of(step, index)],
        }
        for index, why in enumerate(reward)
    ]


def segments_of(step: int, index: int) -> list[dict[str, Any]]:
    prompt = {"role": "user", "turn": 0, "trained": False, "version": -1, "tokens": [5, 6], "texts": ["What", "?"]}
    answer = {"role": "text", "turn": 0, "trained": True, "version": step, "tokens": [7, 8], "texts": [" It", " is\n"]}
    prompt |= {"logprobs": [0.0, 0.0], "advantages": [0.0, 0.0]}
    answer |= {"logprobs": [-0.25, -3.5], "advantages": [0.5 * (index - 1)] * 2}
    return [prompt, answer]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@contextmanager
def serving(folder: Path, key: str | None = None) -> Iterator[str]:
    """Serve a folder from a thread; yields the URL."""
    server, started = ViewerServer(folder, port=0, key=key), threading.Event()
    thread = threading.Thread(target=server.serve, args=[started.set])
    thread.start()
    try:
        assert started.wait(20)
        yield server.url
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()


@contextmanager
def client(folder: Path, key: str | None = None, **options: Any) -> Iterator[httpx.Client]:
    with serving(folder, key) as url, httpx.Client(base_url=url, timeout=20, **options) as session:
        yield session


def run_id(session: httpx.Client, name: str) -> str:
    rows = session.get("/api/runs").json()["runs"]
    return next(row["id"] for row in rows if row["path"] == name)


def part(
    role: str, turn: int, words: str, version: int = -1, trained: bool | None = None, advantage: float = 0.5
) -> dict[str, Any]:
    """A segment of a training row, one token for each word."""
    texts = [f" {word}" if place else word for place, word in enumerate(words.split(" "))]
    tokens = [sum(map(ord, text)) for text in texts]
    counts = version >= 0 if trained is None else trained
    return {
        "role": role,
        "turn": turn,
        "trained": counts,
        "version": version,
        "tokens": tokens,
        "texts": texts,
        "logprobs": [-0.25 * place if version >= 0 else 0.0 for place in range(len(tokens))],
        "advantages": [advantage if counts else 0.0] * len(tokens),
    }


def agent_sample(step: int, hostile: str = "") -> dict[str, Any]:
    """A sample of an agent with tools, whose conversation was summarized after its second turn and so forked."""
    system, question = "You can calculate.", f"What is 6 times 7, plus 0? {hostile}".strip()
    call = {"type": "function", "id": "c1", "function": {"name": f"multiply{hostile}", "arguments": '{"a": 6, "b": 7}'}}
    summary, answer = f"So far: 6 times 7 is 42. {hostile}".strip(), f"It is 42. {hostile}".strip()
    opening = [
        part("template", 0, "<|system|>"),
        part("system", 0, system),
        part("template", 0, "<|user|>"),
        part("user", 0, question),
    ]
    first = [
        *opening,
        part("template", 0, "<|assistant|>"),
        part("call", 0, 'multiply {"a": 6, "b": 7}', step),
        part("template", 1, "<|tool|>"),
        part("tool", 1, "42"),
        part("template", 1, "<|assistant|>"),
        part("text", 1, "Now I add.", step, trained=False),
    ]
    second = [
        *[{**segment, "turn": 2} for segment in opening],
        part("template", 2, "<|assistant|>"),
        part("assistant", 2, summary),
        part("template", 2, "<|user|>"),
        part("user", 2, "Continue."),
        part("template", 2, "<|assistant|>"),
        part("text", 2, answer, step + 1, advantage=-0.25),
    ]
    return {
        "step": step,
        "prompt_index": 0,
        "sample_index": 5,
        "picked": ["best"],
        "reward": 1.5,
        "reward_parts": {"right": 1.0, f"short{hostile}": 0.5},
        "advantage": 0.5,
        "finish_reason": "stop",
        "response_len": 12,
        "logprob_mean": -0.5,
        "prompt": question,
        "completion": f"Now I add.\n{answer}",
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": question},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": f"42 {hostile}".strip()},
            {"role": f"assistant{hostile}", "content": [{"type": "text", "text": answer}]},
        ],
        "rows": [first, second],
    }
