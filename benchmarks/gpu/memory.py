"""Memory of an engine: what was planned for training and for the cache against what is measured, and what stays."""

# ruff: noqa: I001  (shared comes first: it finds the checkout and imports areno before torch)

from __future__ import annotations

import argparse
import gc
from typing import Any

from shared import GIB, Checks, Report, answers, attempt, half, peak_gib, random_engine, random_module, random_rows
from shared import rollout_loop, run_stage, synchronize

import torch

from rollout import kv_bytes_per_token

from areno.engine.model.loading import prepare
from areno.engine.plan import gpu_memory
from areno.engine.rollout.paged.page_allocator import PAGE_SIZE, pages_for
from areno.loss_fns import grpo_loss_fn
from areno.types import Request, SamplingParams

MIB = 2**20


def allocated(device: str) -> int:
    gc.collect()
    synchronize(device)
    if not device.startswith("cuda"):
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def pool(args: argparse.Namespace, checks: Checks, report: Report) -> None:
    """The pool has the promised size, and nothing stays after it is dropped."""
    model = prepare(random_module(args, half(args.device)), "random")
    budget, running = (2048, 8) if args.tiny else (131_072, 64)
    before = allocated(args.device)
    loop = rollout_loop(model, budget_tokens=budget, max_running=running, prefix_tokens=budget // 4)
    sampling = SamplingParams(max_new_tokens=20 if args.tiny else 200, ignore_eos=True)
    prompt = list(range(100 if args.tiny else 500))
    for turn in range(4):
        answers(loop.submit, [Request([turn, i, *prompt], sampling, list(range(8))) for i in range(running // 8)])
        loop.wait_idle()
        report.add("held_mib", round((allocated(args.device) - before) / MIB, 1))
        used = loop.cache.allocator.used * PAGE_SIZE
        checks.below(f"turn {turn}: cached tokens beyond the prefix store's budget", used - loop.prefixes.tokens, 0)
    checks.replayed("pool", loop)
    per_token = kv_bytes_per_token(model)
    size = pages_for(budget, budget // 4, running) * PAGE_SIZE * per_token
    table = loop.cache.table.numel() * 4
    checks.below("bytes by which the pool differs from its promised size", abs(loop.cache.nbytes() - table - size), 0)
    report.update(pool_mib=round(size / MIB, 1), kv_bytes_per_token=per_token)
    if args.device.startswith("cuda"):
        grown = report["held_mib"][-1] - report["held_mib"][0]
        checks.below("MiB by which memory grew after the first turn", grown, 64)
    loop.close()
    checks.below("bytes of the cache that are left", loop.cache.nbytes(), 0)
    # cuBLAS keeps a workspace of 32 MiB for each stream on Hopper.
    checks.below("MiB left after everything was dropped", (allocated(args.device) - before) / MIB, 100)


def planned(args: argparse.Namespace, checks: Checks, report: Report) -> None:
    """What the engine plans before it chooses the cache's size, against a rollout and two training steps."""
    need: list[Any] = []
    divide = gpu_memory.divide
    gpu_memory.divide = lambda free, asked, **rest: need.append((free, asked)) or divide(free, asked, **rest)
    engine = random_engine(args, "tiny" if args.tiny else "0.6B", max_running=64)
    gpu_memory.divide = divide
    report["kv_tokens"], report["recomputed"] = engine.kv_tokens, engine.actor.activation_checkpointing
    sampling = SamplingParams(max_new_tokens=10 if args.tiny else 200, ignore_eos=True)
    rows = random_rows([32] * 4 if args.tiny else [1024] * 32, 400)
    loaded = allocated(args.device)
    peak_gib(args.device)
    for turn in range(2):
        answers(engine.submit, [Request([5] * 20, sampling, list(range(8))) for _ in range(8)])
        engine.end_rollout()
        report.add("peaks_gib", {"rollout": turn, "peak": peak_gib(args.device)})
        cache = engine.loop.cache.nbytes()
        engine.train(rows, grpo_loss_fn, mini_bs=32)
        report.add("peaks_gib", {"training": turn, "peak": (peak := peak_gib(args.device))})
    if need and peak is not None:
        free, asked = need[0]
        training = asked.recomputed if engine.actor.activation_checkpointing else asked.kept
        taken = peak * GIB - loaded - cache
        report["plan"] = {
            "free_gib": free / GIB,
            "planned_gib": (asked.moments + training) / GIB,
            "measured_gib": taken / GIB,
            "cache_gib": cache / GIB,
        }
        checks.below("measured peak of training over the planned one", taken / (asked.moments + training), 1.1)
        checks.below("peak over the GPU's memory", peak * GIB / report["machine"]["memory"], 1.0)
    engine.close()


def stage(args: argparse.Namespace, checks: Checks, report: Report) -> None:
    attempt(report, checks, "pool", lambda: pool(args, checks, report))
    allocated(args.device)
    attempt(report, checks, "plan", lambda: planned(args, checks, report))


if __name__ == "__main__":
    run_stage("memory", stage)
