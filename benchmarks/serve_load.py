"""Throughput and latency of ``areno serve`` under an open-loop Poisson load: requests arrive even if others wait.

    python benchmarks/serve_load.py                                  # a tiny model on this machine
    python benchmarks/serve_load.py --model-path MODEL --rate 4      # a real one
    python benchmarks/serve_load.py --base-url http://host:8000/v1   # any OpenAI-compatible server
    python benchmarks/serve_load.py --save NAME                      # also benchmarks/results/NAME.json

A closed loop of N clients slows down with the server and hides its queue; in this benchmark requests always arrive at
``--rate`` per second. TTFT is the time from sending a request to its first token, TPOT the mean time between the tokens of
one answer after that. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from common import finish, machine, make_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="")
    parser.add_argument("--base-url", default="")
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--max-running-prompts", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", default="")
    return parser.parse_args()


@dataclass
class Measured:
    """Measurements of one request."""

    status: int = 0
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    failed: str = ""


@contextmanager
def server(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Base URL of the server to measure."""
    if args.base_url:
        yield args.base_url.rstrip("/")
        return
    model = args.model_path or str(folder / "model")
    if not args.model_path:
        make_checkpoint(folder / "model")
    command = [sys.executable, "-m", "areno", "serve", "--model-path", model, "--port", "0", "--max-queue", "100000"]
    command += ["--max-running-prompts", str(args.max_running_prompts)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    )
    try:
        assert process.stdout is not None
        found = re.search(r"at (http://\S+)", process.stdout.readline())
        if found is None or not any("ready" in line for line in process.stdout):
            sys.exit("the server did not start")
        yield found[1]
    finally:
        process.terminate()
        process.wait(60)


async def one(client: httpx.AsyncClient, args: argparse.Namespace, model: str, number: int) -> Measured:
    """Send one request and time its tokens."""
    draw = random.Random(f"{args.seed} {number}")
    prompt = [draw.randrange(10, 500) for _ in range(args.prompt_tokens)]
    body = {"model": model, "prompt": prompt, "max_tokens": args.new_tokens, "ignore_eos": True, "seed": number}
    body |= {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    found = Measured(sent=time.perf_counter())
    try:
        async with client.stream("POST", "/completions", json=body) as answer:
            found.status = answer.status_code
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if chunk.get("usage"):
                    found.tokens = chunk["usage"]["completion_tokens"]
                elif any(choice.get("token_ids", choice["text"]) for choice in chunk.get("choices", [])):
                    found.times.append(time.perf_counter())
    except httpx.HTTPError as error:
        found.failed = type(error).__name__
    return found


async def load(args: argparse.Namespace, base_url: str) -> tuple[list[Measured], float]:
    """Send all requests at their arrival times; returns the measurements, and how long it took."""
    arrivals = random.Random(args.seed)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=base_url, timeout=600, limits=limits) as client:
        model = (await client.get("/models")).json()["data"][0]["id"]
        await one(client, args, model, -1)  # the first request includes one-time costs
        began, tasks = time.perf_counter(), []
        due = began
        for number in range(args.requests):
            due += arrivals.expovariate(args.rate)
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            tasks.append(asyncio.create_task(one(client, args, model, number)))
        return await asyncio.gather(*tasks), time.perf_counter() - began


def percentiles(values: list[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds."""
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50_ms": round(cuts[49] * 1000, 2), "p99_ms": round(cuts[98] * 1000, 2)}


def summary(measured: list[Measured], seconds: float) -> dict[str, Any]:
    """Totals and percentiles of the requests."""
    good = [one for one in measured if one.status == 200 and not one.failed and one.times]
    spans = [(one.times[-1] - one.times[0]) / (one.tokens - 1) for one in good if one.tokens > 1]
    return {
        "completed": len(good),
        "failed": len(measured) - len(good),
        "seconds": round(seconds, 2),
        "requests_per_s": round(len(good) / seconds, 3),
        "tokens_per_s": round(sum(one.tokens for one in good) / seconds, 1),
        "ttft": percentiles([one.times[0] - one.sent for one in good]),
        "tpot": percentiles(spans),
        "latency": percentiles([one.times[-1] - one.sent for one in good]),
    }


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as name, server(args, Path(name)) as base_url:
        measured, seconds = asyncio.run(load(args, base_url))
    settings = {key: value for key, value in vars(args).items() if key != "save"}
    report = {"benchmark": "serve_load", "machine": machine(), "settings": settings, **summary(measured, seconds)}
    for key in ("completed", "failed", "requests_per_s", "tokens_per_s", "ttft", "tpot", "latency"):
        print(f"{key:15} {report[key]}")
    finish(report, args.save)


if __name__ == "__main__":
    main()
