"""What generation holds and gives back: the pool's size is the promised one, and nothing stays after it is dropped."""

# ruff: noqa: I001  (shared comes first: it finds the checkout and imports areno before torch)

from __future__ import annotations

import argparse
import gc

from shared import Checks, Report, random_module, run_part, synchronize

import torch

from areno.engine.model.loading import prepare
from areno.engine.rollout.paged.loop import PagedRolloutLoop
from areno.engine.rollout.paged.pages import PAGE_SIZE, pages_for
from areno.types import Request, SamplingParams

MIB = 2**20


def allocated(device: str) -> int:
    gc.collect()
    synchronize(device)
    if not device.startswith("cuda"):
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def part(args: argparse.Namespace, checks: Checks, report: Report) -> None:
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    model = prepare(random_module(args, dtype), "random")
    budget, running = (2048, 8) if args.tiny else (131_072, 64)
    before = allocated(args.device)
    loop = PagedRolloutLoop(
        model,
        eos_ids=frozenset(),
        make_stop_text=None,
        budget_tokens=budget,
        max_running=running,
        prefix_tokens=budget // 4,
    )
    sampling = SamplingParams(max_new_tokens=20 if args.tiny else 200, ignore_eos=True)
    prompt = list(range(100 if args.tiny else 500))
    for turn in range(4):
        asked = [Request([turn, i, *prompt], sampling, list(range(8))) for i in range(running // 8)]
        for future in loop.submit(asked):
            future.result(timeout=100)
        loop.wait_idle()
        held = allocated(args.device) - before
        report.setdefault("held_mib", []).append(round(held / MIB, 1))
        used = loop.cache.allocator.used * PAGE_SIZE
        checks.below(f"turn {turn}: cached tokens beyond the prefix store's budget", used - loop.prefixes.tokens, 0)
    config = model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    pool = pages_for(budget, budget // 4, running) * PAGE_SIZE * per_token
    table = loop.cache.table.numel() * 4
    checks.below("bytes by which the pool differs from its promised size", abs(loop.cache.nbytes() - table - pool), 0)
    report |= {"pool_mib": round(pool / MIB, 1), "kv_bytes_per_token": per_token}
    if args.device.startswith("cuda"):
        checks.below(
            "MiB by which memory grew after the first turn", report["held_mib"][-1] - report["held_mib"][0], 64
        )
        report["peak_mib"] = round(torch.cuda.max_memory_allocated() / MIB, 1)
    loop.close()
    loop.drop_cache()
    checks.below("bytes of the cache that are left", loop.cache.nbytes(), 0)
    checks.below("MiB left after everything was dropped", (allocated(args.device) - before) / MIB, 64)


if __name__ == "__main__":
    run_part("memory", part)
