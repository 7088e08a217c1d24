"""Rollout, training, rollout with a model of four billion parameters on one GPU, the cache kept and dropped in between."""

# ruff: noqa: I001  (shared comes first: it finds the checkout and imports areno before torch)

from __future__ import annotations

import argparse
import gc
import time

from shared import Checks, Report, answers, attempt, peak_gib, random_engine, random_rows, run_stage, step_counts
from shared import synchronize

import torch

from areno.loss_fns import grpo_loss_fn
from areno.types import Request, SamplingParams


def cycle(args: argparse.Namespace, checks: Checks, report: Report, keeps: bool) -> None:
    """Three rollouts with two updates in between; all steps are replayed, and every token has its weights' version."""
    name = "cache kept" if keeps else "cache dropped"
    began = time.perf_counter()
    engine = random_engine(args, "tiny" if args.tiny else "4B", max_running=32, keep_rollout_state=keeps)
    loaded = {"cycle": name, "load_s": round(time.perf_counter() - began, 1), "kv_tokens": engine.kv_tokens}
    report.add("engines", loaded | {"recomputed": engine.actor.activation_checkpointing})
    sampling = SamplingParams(max_new_tokens=8 if args.tiny else 128, ignore_eos=True)
    rows = random_rows([32] * 4 if args.tiny else [1024] * 16, 400)
    for turn in range(3):
        before, began = (step_counts(engine.loop) if turn else (0, 0)), time.perf_counter()
        results = answers(engine.submit, [Request([5 + i] * 64, sampling, list(range(4))) for i in range(8)])
        engine.end_rollout()
        took = time.perf_counter() - began
        tokens = [sample for result in results for sample in result.sequences]
        checks.true(f"{name}, rollout {turn}: version", {v for sample in tokens for v in sample.versions} == {turn})
        if args.device.startswith("cuda"):
            checks.replayed(f"{name}, rollout {turn}", engine.loop, before)
        entry = {"cycle": name, "rollout": turn, "seconds": round(took, 2), "peak_gib": peak_gib(args.device)}
        report.add("phases", entry)
        if turn == 2:
            break
        began = time.perf_counter()
        stats = engine.train(rows, grpo_loss_fn, mini_bs=16)
        synchronize(args.device)
        entry = {"cycle": name, "training": turn, "seconds": round(time.perf_counter() - began, 2)}
        report.add("phases", entry | {"grad_norm": stats["grad_norm"], "peak_gib": peak_gib(args.device)})
        checks.below(f"{name}, update {turn}: skipped", stats["update_skipped"], 0)
    engine.close()


def stage(args: argparse.Namespace, checks: Checks, report: Report) -> None:
    for keeps in (True, False):
        attempt(report, checks, f"cycle, keeps={keeps}", lambda keeps=keeps: cycle(args, checks, report, keeps))
        gc.collect()
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()


if __name__ == "__main__":
    run_stage("cycle", stage)
