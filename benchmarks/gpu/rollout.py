"""Tokens per second of the mixed workload: 256 prompts of 100 to 1024 tokens, 100 to 1024 new tokens each, Qwen3-0.6B.

Prompts and lengths are those of the workload that nano-vllm and mini-sglang publish (seed 0: 142,827 tokens in, 133,966
out). The ceiling is what the weights and the cache of every step cost at the copy rate that was measured first. Measured with
prefills of 8,192 and of 512 tokens beside decoding, and without graphs.
"""

# ruff: noqa: I001  (shared comes first: it finds the checkout and imports areno before torch)

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from shared import Checks, Report, answers, half, peak_gib, random_module, rollout_loop, run_stage, synchronize

import torch

from areno.engine.model.loading import prepare
from areno.engine.rollout import loop as loop_module
from areno.types import Request, SamplingParams

IN, OUT = 142_827, 133_966


def workload(tiny: bool) -> list[Request]:
    rng = random.Random(0)
    count, least, most, vocab = (12, 10, 60, 500) if tiny else (256, 100, 1024, 10_000)
    prompts = [[rng.randint(0, vocab) for _ in range(rng.randint(least, most))] for _ in range(count)]
    lengths = [rng.randint(least, most) for _ in range(count)]
    return [
        Request(prompt, SamplingParams(temperature=0.6, max_new_tokens=new, ignore_eos=True), [seed])
        for seed, (prompt, new) in enumerate(zip(prompts, lengths, strict=True))
    ]


def kv_bytes_per_token(model: Any) -> int:
    """Bytes that the keys and values of one token take."""
    config = model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize


def bytes_read(model: Any, asked: list[Request], per_token: int) -> float:
    """Weights once per step, and the cache of every running sequence once per step."""
    weights = sum(p.numel() * p.element_size() for p in model.module.parameters())
    steps = max(request.sampling.max_new_tokens for request in asked)
    cells = sum(len(r.prompt_tokens) * r.sampling.max_new_tokens + r.sampling.max_new_tokens**2 / 2 for r in asked)
    return weights * steps + cells * per_token


def timed_pass(loop: Any, asked: list[Request], device: str) -> float:
    synchronize(device)
    began = time.perf_counter()
    answers(loop.submit, asked)
    synchronize(device)
    return time.perf_counter() - began


def one_way(
    args: argparse.Namespace,
    checks: Checks,
    report: Report,
    model: Any,
    asked: list[Request],
    way: tuple[str, int, bool],
) -> None:
    name, prefill, eager = way
    loop_module.BUSY_PREFILL = loop_module.BUSY_PREFILL_CUDA = prefill
    loop = rollout_loop(
        model, eager_decode=eager, budget_tokens=len(asked) * 2048, max_running=len(asked) if args.tiny else 256
    )
    tokens, best = sum(request.sampling.max_new_tokens for request in asked), float("inf")
    for turn in range(1 if eager else 3):
        took = timed_pass(loop, asked, args.device)
        best = min(best, took)
        entry: dict[str, Any] = {
            "way": name,
            "pass": turn,
            "seconds": round(took, 3),
            "tokens_per_s": round(tokens / took),
        }
        if "copy_tb_s" in report["machine"]:
            rate = report["machine"]["copy_tb_s"] * 1e12
            read = bytes_read(model, asked, kv_bytes_per_token(model))
            entry |= {"share_of_ceiling": round(read / rate / took, 3), "peak_gib": peak_gib(args.device)}
        report.add("passes", entry)
        missing = (turn + 1) * tokens - loop.counters.generated_total
        checks.below(f"{name}, pass {turn}: tokens that are missing", abs(missing), 0)
    if not eager:
        checks.replayed(name, loop)
    report[f"{name}: graphs, preemptions"] = len(loop.device_decode._graphs), loop.scheduler.preemptions
    report[f"{name}: tokens per s"] = round(tokens / best)
    loop.close()


def stage(args: argparse.Namespace, checks: Checks, report: Report) -> None:
    asked = workload(args.tiny)
    tokens_in = sum(len(request.prompt_tokens) for request in asked)
    tokens = sum(request.sampling.max_new_tokens for request in asked)
    if not args.tiny:
        checks.below("tokens that differ from the published workload", abs(tokens_in - IN) + abs(tokens - OUT), 0)
    model = prepare(random_module(args, half(args.device)), "random")
    report.update(requests=len(asked), tokens_in=tokens_in, tokens_out=tokens)
    for way in (("prefill 8192", 8192, False), ("prefill 512", 512, False), ("eager, prefill 8192", 8192, True)):
        one_way(args, checks, report, model, asked, way)
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()


if __name__ == "__main__":
    run_stage("rollout", stage)
