"""Training steps of the model: tokens per second, share of the measured matrix product rate, peak memory, host syncs, and how
exact the output head's gradient is, for chunk sizes, pass sizes, with and without recomputation."""

# ruff: noqa: I001  (shared comes first: it finds the checkout and imports areno before torch)

from __future__ import annotations

import argparse
import copy
import time
import warnings
from typing import Any

from shared import Checks, Report, attempt, half, peak_gib, random_module, random_rows, run_stage, synchronize

import torch

from areno.engine.model import causal_lm, chunked_head
from areno.engine.model.loading import prepare
from areno.engine.train import step as step_module
from areno.engine.train.optimizer import MasterAdamW, OptimizerOptions
from areno.engine.train.step import TrainStep
from areno.loss_fns import grpo_loss_fn, sft_loss_fn

# Name, loss, recomputation, rows of a chunk (None: as the engine chooses), tokens of a pass (None likewise).
WAYS: tuple[tuple[str, Any, bool, int | None, int | None], ...] = (
    ("grpo, as it comes, recomputed", grpo_loss_fn, True, None, None),
    ("grpo, as it comes, kept", grpo_loss_fn, False, None, None),
    ("grpo, chunks of 55 rows", grpo_loss_fn, True, 55, None),
    ("grpo, chunks of 2048 rows", grpo_loss_fn, True, 2048, None),
    ("grpo, passes of 3072 tokens", grpo_loss_fn, True, None, 3072),
    ("grpo, passes of 16384 tokens", grpo_loss_fn, True, None, 16384),
    ("sft, as it comes, recomputed", sft_loss_fn, True, None, None),
    ("sft, as it comes, kept", sft_loss_fn, False, None, None),
)


def measure(args: argparse.Namespace, checks: Checks, report: Report, model: Any, optimizer: Any, way: Any) -> None:
    """Three steps, after one that does not count."""
    name, loss_fn, recompute, chunk, tokens_of_pass = way
    own_rows, own_most = chunked_head.rows_of_chunk, step_module.most_tokens
    causal_lm.rows_of_chunk = (lambda *_: chunk) if chunk else own_rows
    step_module.most_tokens = (lambda _: tokens_of_pass) if tokens_of_pass else own_most
    batch = (
        random_rows([64 - i for i in range(8)], 500)
        if args.tiny
        else random_rows([1024 - i * 8 for i in range(64)], 100_000)
    )
    tokens = sum(len(row.tokens) for row in batch)
    step = TrainStep(model, optimizer, recompute)
    try:
        peak_gib(args.device)
        stats = step.run(batch, loss_fn, mini_bs=64)
        synchronize(args.device)
        began = time.perf_counter()
        for _ in range(3):
            stats = step.run(batch, loss_fn, mini_bs=64)
        synchronize(args.device)
        took = (time.perf_counter() - began) / 3
    finally:
        causal_lm.rows_of_chunk, step_module.most_tokens = own_rows, own_most
    finite = all(value == value and abs(value) != float("inf") for value in stats.values())
    checks.true(f"{name}: statistics are finite", finite)
    entry = {
        "way": name,
        "seconds": round(took, 4),
        "tokens_per_s": round(tokens / took),
        "peak_gib": peak_gib(args.device),
    }
    if "matmul_tflop_s" in report["machine"]:
        flop = 6 * sum(p.numel() for _, p in model.parameters()) * tokens
        entry["share_of_matmul_rate"] = round(flop / took / (report["machine"]["matmul_tflop_s"] * 1e12), 3)
    report.add("steps", entry)


def count_syncs(checks: Checks, report: Report, model: Any, optimizer: Any) -> None:
    """Times that the host waits for the device in one step of several passes."""
    step, batch = TrainStep(model, optimizer, True), random_rows([512] * 32, 500)
    step.run(batch, grpo_loss_fn, mini_bs=8)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step.run(batch, grpo_loss_fn, mini_bs=8)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    where = [f"{w.filename.rpartition('/')[2]}:{w.lineno}" for w in said if "synchroniz" in str(w.message)]
    report["host_syncs"] = {"count": len(where), "where": sorted(set(where))}
    checks.below("host syncs of a step of four passes", len(where), 12)


def head_gradient(args: argparse.Namespace, checks: Checks, report: Report, module: Any) -> None:
    """Relative error of the output head's gradient against fp32, over many chunks."""
    rows, size = (200, 8) if args.tiny else (8192, 256)
    exact = prepare(copy.deepcopy(module).float(), "fp32")
    rounded = prepare(copy.deepcopy(module).to(torch.bfloat16), "bf16")
    hidden = torch.randn(rows, module.config.hidden_size, device=args.device).to(torch.bfloat16)
    targets = torch.randint(0, module.config.vocab_size, (rows,), device=args.device)
    warmth = torch.ones(rows, device=args.device)
    own_rows, gradients = chunked_head.rows_of_chunk, {}
    for name, model, kind in (("exact", exact, "cuda"), ("fp32 sum", rounded, "cuda"), ("bf16 sum", rounded, "cpu")):
        model.computes_on = kind
        causal_lm.rows_of_chunk = (lambda *_: size) if size else own_rows
        model.logprobs(hidden.to(model.dtype), targets, warmth).sum().backward()
        weight = model.module.get_output_embeddings().weight
        gradients[name], weight.grad = weight.grad.double().cpu(), None
    causal_lm.rows_of_chunk = own_rows
    errors = {
        name: float((gradients[name] - gradients["exact"]).norm() / gradients["exact"].norm())
        for name in ("fp32 sum", "bf16 sum")
    }
    report["head_gradient_error"] = errors
    checks.below(
        "error of the head's gradient, relative to that of a sum in bf16", errors["fp32 sum"] / errors["bf16 sum"], 0.7
    )


def stage(args: argparse.Namespace, checks: Checks, report: Report) -> None:
    module = random_module(args, half(args.device))
    attempt(report, checks, "head gradient", lambda: head_gradient(args, checks, report, module))
    model = prepare(module, "random")
    model.module.requires_grad_(True)
    optimizer = MasterAdamW(model.parameters(), OptimizerOptions(lr=1e-6))
    for way in WAYS[: 2 if args.tiny else None]:
        attempt(report, checks, way[0], lambda way=way: measure(args, checks, report, model, optimizer, way))
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()
    if args.device.startswith("cuda"):
        attempt(report, checks, "host syncs", lambda: count_syncs(checks, report, model, optimizer))


if __name__ == "__main__":
    run_stage("train", stage)
