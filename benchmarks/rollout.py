"""Tokens per second of rollout, areno against `transformers` generate: same model, prompts, lengths and sampling, in one run.

    python benchmarks/rollout.py                     # table, then one line of JSON
    python benchmarks/rollout.py --only tiny shared  # some workloads
    python benchmarks/rollout.py --save NAME         # also benchmarks/results/NAME.json

Each side runs in a fresh process, turn and turn about, with the same number of threads; within a process the first pass is
not counted. Both sample at temperature 1 in fp32, return the log-prob of every sampled token, and generate exactly the
same numbers of tokens. `generate` gets all samples in one padded batch, which is its best setting here; it decodes a row
that has ended until the last one has. The machine's limit is the rate of its large matrix products, measured first.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, machine, make_checkpoint, median, run_worker

TINY = {"hidden": 128, "layers": 4, "vocab": 600}
SMALL = {"hidden": 512, "layers": 8, "vocab": 32_000}


def workloads() -> dict[str, dict[str, Any]]:
    """Model, prompts (token counts), samples per prompt, and new tokens of each sample."""
    rng = random.Random(0)
    tail = [min(1024, max(4, round(math.exp(rng.gauss(math.log(128) - 0.5, 1.0))))) for _ in range(128)]
    return {
        "tiny": {"model": TINY, "prompts": [16] * 32, "samples": 8, "lengths": [128] * 256},
        "small": {"model": SMALL, "prompts": [16] * 8, "samples": 8, "lengths": [64] * 64},
        "long-tail": {"model": TINY, "prompts": [16] * 128, "samples": 1, "lengths": tail},
        "shared": {"model": TINY, "prompts": [512], "samples": 16, "lengths": [128] * 16},
    }


def matmul_rate(threads: int) -> float:
    """GFLOP/s of a large fp32 matrix product."""
    import torch

    torch.set_num_threads(threads)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    times = []
    for _ in range(12):
        began = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - began)
    return round(2 * 1024**3 / sorted(times)[len(times) // 2] / 1e9, 1)


def measure(workload: dict[str, Any], args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both sides, turn and turn about."""
    model = folder / "model"
    parameters = make_checkpoint(model, **workload["model"])
    settings = {**workload, "model": str(model), "threads": args.threads, "passes": args.passes}
    tokens = sum(workload["lengths"])
    runs: dict[str, list[dict[str, Any]]] = {"areno": [], "generate": []}
    for _ in range(args.repeats):
        for name in runs:
            script = ROOT / "benchmarks" / "workers" / f"{name}_rollout.py"
            runs[name].append(run_worker(sys.executable, script, settings))
    sides = {}
    for name, results in runs.items():
        assert all(result["tokens"] == tokens for result in results)
        seconds = [s for result in results for s in result["seconds"]]
        sides[name] = {
            "seconds": median(seconds),
            "tokens_per_s": round(tokens / median(seconds)),
            "first_pass_s": median([result["first"] for result in results]),
            "peak_mib": round(max(result["peak_mib"] for result in results), 1),
        }
    return {
        "parameters": parameters,
        "tokens": tokens,
        **sides,
        "areno_over_generate": round(sides["generate"]["seconds"] / sides["areno"]["seconds"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(workloads()), default=list(workloads()))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--save", default="")
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "threads": args.threads}
    result["matmul_gflops"] = matmul_rate(args.threads)
    print(f"{'workload':<12}{'areno tok/s':>14}{'generate tok/s':>16}{'ratio':>8}")
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            found = result[name] = measure(workloads()[name], args, Path(folder))
        sides = (found["areno"]["tokens_per_s"], found["generate"]["tokens_per_s"])
        print(f"{name:<12}{sides[0]:>14,}{sides[1]:>16,}{found['areno_over_generate']:>8.2f}", flush=True)
    if args.save:
        (ROOT / "benchmarks" / "results" / f"{args.save}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
