"""Training steps of the model: tokens per second, share of the measured matrix product rate, peak memory."""

# ruff: noqa: I001  (shared comes first: it finds the checkout and imports areno before torch)

from __future__ import annotations

import argparse
import time

from shared import Checks, Report, random_module, run_part, synchronize

import torch

from areno.engine.model.loading import prepare
from areno.engine.train.optimizer import MasterAdamW, OptimizerConfig
from areno.engine.train.step import TrainStep
from areno.loss_fns import grpo_loss_fn
from areno.types import TrainSequence


def rows(count: int, length: int, vocab: int) -> list[TrainSequence]:
    """Sequences of ``length`` and less, a quarter of each a prompt."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        own = length - (i * length // (2 * count))
        ids = torch.randint(1, vocab, (own,), generator=generator).tolist()
        prompt = own // 4
        made.append(
            TrainSequence(
                prompt_mask=[True] * prompt + [False] * (own - prompt),
                tokens=ids,
                logprobs=[0.0] * prompt + [-6.0] * (own - prompt),
                advantages=[0.0] * prompt + [1.0 - 2.0 * (i % 2)] * (own - prompt),
            )
        )
    return made


def part(args: argparse.Namespace, checks: Checks, report: Report) -> None:
    cuda = args.device.startswith("cuda")
    dtype = torch.bfloat16 if cuda else torch.float32
    model = prepare(random_module(args, dtype), "random")
    model.module.requires_grad_(True)
    batch = rows(8, 64, 500) if args.tiny else rows(64, 1024, 100_000)
    tokens = sum(len(row.tokens) for row in batch)
    count = sum(p.numel() for _, p in model.parameters())
    report |= {"rows": len(batch), "tokens": tokens, "parameters": count}
    optimizer = MasterAdamW(model.parameters(), OptimizerConfig(lr=1e-6))
    for name, checkpointing in (("checkpointing", True), ("no_checkpointing", False)):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        step = TrainStep(model, optimizer, checkpointing)
        stats = [step.run(batch, grpo_loss_fn, mini_bs=8)]
        synchronize(args.device)
        began = time.perf_counter()
        for _ in range(3):
            stats.append(step.run(batch, grpo_loss_fn, mini_bs=8))
        synchronize(args.device)
        took = (time.perf_counter() - began) / 3
        finite = all(value == value and abs(value) != float("inf") for one in stats for value in one.values())
        checks.below(f"{name}: statistics that are not finite", float(not finite), 0)
        report[name] = found = {"seconds": round(took, 4), "tokens_per_s": round(tokens / took)}
        if cuda:
            rate = report["machine"]["matmul_tflop_s"] * 1e12
            found["share_of_matmul_rate"] = round(6 * count * tokens / took / rate, 3)
            found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        print(name, found, flush=True)


if __name__ == "__main__":
    run_part("train", part)
