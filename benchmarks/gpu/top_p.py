"""What requests with top-p or top-k cost the batch that they are in: tokens per second, and the share of replayed steps."""

from __future__ import annotations

import argparse
from dataclasses import replace

from rollout import timed_pass
from shared import Checks, Report, half, random_module, rollout_loop, run_stage, step_counts

from areno.engine.model.loading import prepare
from areno.types import Request, SamplingParams


def batch(count: int, new: int, filtered: int, **more: float | int) -> list[Request]:
    """Equal requests; some of them with further sampling parameters."""
    plain = SamplingParams(temperature=0.8, max_new_tokens=new, ignore_eos=True)
    return [Request([5 + i] * 50, replace(plain, **more) if i < filtered else plain, [i]) for i in range(count)]


def stage(args: argparse.Namespace, checks: Checks, report: Report) -> None:
    model = prepare(random_module(args, half(args.device)), "random")
    count, new = (8, 10) if args.tiny else (128, 256)
    ways = {
        "plain": batch(count, new, 0),
        "one row with top-p": batch(count, new, 1, top_p=0.9),
        "all rows with top-p": batch(count, new, count, top_p=0.9),
        "all rows with top-k": batch(count, new, count, top_k=50),
        "all rows with a repetition penalty": batch(count, new, count, repetition_penalty=1.1),
    }
    loop = rollout_loop(model, max_running=count, budget_tokens=count * 512)
    for name, requests in ways.items():
        timed_pass(loop, requests, args.device)
        loop.wait_idle()
        before = step_counts(loop)
        took = timed_pass(loop, requests, args.device)
        loop.wait_idle()
        steps, replays = (now - then for now, then in zip(step_counts(loop), before, strict=True))
        entry = {
            "batch": name,
            "tokens_per_s": round(count * new / took),
            "replayed": round(replays / max(steps, 1), 3),
        }
        report.add("batches", entry)
        if name == "plain":
            checks.replayed(name, loop)
    loop.close()


if __name__ == "__main__":
    run_stage("top_p", stage)
