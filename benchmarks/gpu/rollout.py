"""Tokens per second of the mixed workload: 256 prompts of 100 to 1024 tokens, 100 to 1024 new tokens each, Qwen3-0.6B.

Prompts and lengths are those of the workload that nano-vllm and mini-sglang publish (seed 0: 142,827 tokens in, 133,966
out). The ceiling is what the weights and the cache of every step cost at the copy rate that was measured first.
"""

# ruff: noqa: I001  (shared comes first: it finds the checkout and imports areno before torch)

from __future__ import annotations

import argparse
import random
import time

from shared import Checks, Report, random_module, run_part, synchronize

import torch

from areno.engine.model.causal_lm import CausalLM
from areno.engine.model.loading import prepare
from areno.engine.rollout.loop import RolloutLoop
from areno.engine.rollout.paged.loop import PagedRolloutLoop
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


def bytes_read(model: CausalLM, asked: list[Request], per_token: int) -> float:
    """Weights once per step, and the cache of every running sequence once per step."""
    weights = sum(p.numel() * p.element_size() for p in model.module.parameters())
    steps = max(request.sampling.max_new_tokens for request in asked)
    cells = sum(len(r.prompt_tokens) * r.sampling.max_new_tokens + r.sampling.max_new_tokens**2 / 2 for r in asked)
    return weights * steps + cells * per_token


def timed_pass(loop: RolloutLoop, asked: list[Request], device: str) -> float:
    synchronize(device)
    began = time.perf_counter()
    for future in loop.submit(asked):
        future.result(timeout=200)
    synchronize(device)
    return time.perf_counter() - began


def part(args: argparse.Namespace, checks: Checks, report: Report) -> None:
    asked = workload(args.tiny)
    tokens_in = sum(len(request.prompt_tokens) for request in asked)
    tokens = sum(request.sampling.max_new_tokens for request in asked)
    if not args.tiny:
        checks.below("tokens that differ from the published workload", abs(tokens_in - IN) + abs(tokens - OUT), 0)
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    model = prepare(random_module(args, dtype), "random")
    report |= {"requests": len(asked), "tokens_in": tokens_in, "tokens_out": tokens}
    settings = {
        "eos_ids": frozenset(),
        "make_stop_text": None,
        "budget_tokens": len(asked) * 2048,
        "max_running": len(asked),
    }
    for name, eager in (("graphs", False), ("eager", True)):
        loop = PagedRolloutLoop(model, eager_decode=eager, **settings)
        passes = [timed_pass(loop, asked, args.device) for _ in range(3 if name == "graphs" else 1)]
        checks.below(f"{name}: tokens that are missing", abs(loop.counters.generated - tokens * len(passes)), 0)
        best = min(passes)
        report[name] = {
            "first_s": round(passes[0], 3),
            "seconds": [round(s, 3) for s in passes],
            "tokens_per_s": round(tokens / best),
            "decode_steps": loop.counters.decode_steps // len(passes),
            "replays": loop.device_decode.replays,
            "preemptions": loop.scheduler.preemptions,
        }
        per_token = loop.cache.bytes_per_token()
        if "copy_tb_s" in report["machine"]:
            rate = report["machine"]["copy_tb_s"] * 1e12
            report["ceiling_tokens_per_s"] = ceiling = round(tokens / (bytes_read(model, asked, per_token) / rate))
            report[name]["share_of_ceiling"] = round(tokens / best / ceiling, 3)
            report[name]["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        print(name, report[name], flush=True)
        loop.close()
        loop.drop_cache()


if __name__ == "__main__":
    run_part("rollout", part)
