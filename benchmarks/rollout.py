"""Tokens per second of rollout, areno against its peers: same model, prompts, lengths, sampling and threads, in one run.

    bash benchmarks/peers.sh vllm                          # once: vLLM for CPUs in .peers/vllm
    python benchmarks/rollout.py                           # table, then one line of JSON
    python benchmarks/rollout.py --only tiny shared        # some workloads
    python benchmarks/rollout.py --peers generate vllm     # some peers
    python benchmarks/rollout.py --peers without_row_product eager_without_row_product   # the effect of a kernel
    python benchmarks/rollout.py --device cuda --only mixed
    python benchmarks/rollout.py --save NAME               # also benchmarks/results/NAME.json

Each side runs in fresh processes with its best documented settings, interleaved. All sample at temperature 1 (fp32 on a
CPU, bf16 on a GPU), return the log-prob of every token, and generate exactly the same numbers of tokens; both are checked.
The first pass of a process is reported separately, and so is the time of compiling with an empty cache: ``compile_s`` is the
part of loading that compiles plus the additional time of the first pass over later ones. Including it, a rate is
tokens / (compile_s + seconds). Loading is not counted. The machine's limits are measured in the same run; ``limits.py``
explains them.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import limits
from common import PEERS, ROOT, WorkerFailedError, finish, machine, make_checkpoint, median, run_worker
from limits import Shape

WORKERS = ROOT / "benchmarks" / "workers"

TINY = Shape(hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, intermediate=384, vocab=600)
SMALL = Shape(hidden=512, layers=8, heads=4, kv_heads=2, head_dim=128, intermediate=1536, vocab=32_000)
SMOLLM2_135M = Shape(hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49_152)
QWEN3_06B = Shape(hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=151_936)


@dataclass(frozen=True)
class Workload:
    """What is generated: tokens of each prompt, samples per prompt, and new tokens of each prompt's samples."""

    shape: Shape
    prompts: list[int]
    samples: int
    lengths: list[int]
    prompt_ids: int = 500
    devices: tuple[str, ...] = ("cpu", "cuda")

    @property
    def tokens(self) -> int:
        """New tokens of a pass."""
        return self.samples * sum(self.lengths)

    @property
    def per_sample(self) -> list[int]:
        """New tokens of each sample."""
        return [length for length in self.lengths for _ in range(self.samples)]


def long_tail(count: int) -> list[int]:
    """Log-normal lengths (sigma 1) with a mean of 128, from 4 to 1024."""
    rng = random.Random(0)
    return [min(1024, max(4, round(math.exp(rng.gauss(math.log(128) - 0.5, 1.0))))) for _ in range(count)]


def mixed(count: int) -> tuple[list[int], list[int]]:
    """Prompt and response lengths of nano-vllm's benchmark: 100 to 1024 each, in the order in which its seed 0 draws them."""
    rng = random.Random(0)
    prompts = []
    for _ in range(count):
        prompts.append(rng.randint(100, 1024))
        for _ in range(prompts[-1]):
            rng.randint(0, 10_000)
    return prompts, [rng.randint(100, 1024) for _ in range(count)]


def workloads() -> dict[str, Workload]:
    """All workloads, by name."""
    prompts, lengths = mixed(256)
    return {
        "tiny": Workload(TINY, [16] * 32, 8, [128] * 32),
        "small": Workload(SMALL, [16] * 8, 8, [64] * 8),
        "135m": Workload(SMOLLM2_135M, [120] * 8, 8, [64] * 8),
        "long-tail": Workload(TINY, [16] * 128, 1, long_tail(128)),
        "shared": Workload(TINY, [512], 16, [128]),
        "mixed": Workload(QWEN3_06B, prompts, 1, lengths, prompt_ids=10_000, devices=("cuda",)),
    }


@dataclass(frozen=True)
class Side:
    """One program to measure.

    Attributes:
        script: script in ``benchmarks/workers``.
        options: options of the script.
        peer: name of its environment under .peers; empty for this one.
        devices: devices that it runs on in this benchmark.
    """

    script: str
    options: dict[str, Any] = field(default_factory=dict)
    peer: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return PEERS / self.peer / "bin" / "python" if self.peer else Path(sys.executable)

    def missing(self, device: str) -> str:
        """Why it cannot run on this machine; empty if it can."""
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        if not self.python.exists():
            return f"not set up; run: bash benchmarks/peers.sh {self.peer}"
        return ""


OURS = {
    "areno": Side("areno_rollout.py", {"decode": "compiled"}),
    "areno_eager": Side("areno_rollout.py", {"decode": "eager"}),
}
KERNELS = ("row_product", "decode_attention", "plain_draw")
ABLATIONS = {
    f"{prefix}without_{name}": Side("areno_rollout.py", {"decode": decode, "without": kernels}, devices=("cpu",))
    for prefix, decode in (("", "compiled"), ("eager_", "eager"))
    for name, kernels in [*((kernel, [kernel]) for kernel in KERNELS), ("kernels", list(KERNELS))]
}
"""areno without one of its kernels, or without all: how many times faster areno is than these is the effect of a kernel."""
PEERS_BY_DEFAULT = {
    "generate": Side("generate_rollout.py", {"compiled": False}),
    "generate_compiled": Side("generate_rollout.py", {"compiled": True}),
    "continuous_batching": Side("cb_rollout.py"),
    "vllm": Side("vllm_rollout.py", peer="vllm", devices=("cpu",)),
}
OTHERS = PEERS_BY_DEFAULT | ABLATIONS
SIDES = OURS | OTHERS


def caches(folder: Path) -> dict[str, str]:
    """Environment with the compile caches in this folder, so that the first process of a side starts with empty ones."""
    names = {"ARENO_CACHE_DIR": "areno", "TORCHINDUCTOR_CACHE_DIR": "inductor", "VLLM_CACHE_ROOT": "vllm"}
    names |= {"XDG_CACHE_HOME": "cache"}
    return {variable: str(folder / name) for variable, name in names.items()}


def run_sides(workload: Workload, sides: list[str], args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all sides, interleaved; a peer that fails is reported with its error and left out from then on."""
    settings = {
        "model": str(folder / "model"),
        "device": args.device,
        "dtype": args.dtype,
        "threads": args.threads,
        "prompts": workload.prompts,
        "samples": workload.samples,
        "lengths": workload.per_sample,
        "prompt_ids": workload.prompt_ids,
        "passes": args.passes,
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    failed: dict[str, str] = {}
    for _ in range(args.repeats):
        for name in sides:
            if name in failed:
                continue
            side = SIDES[name]
            try:
                found = run_worker(
                    side.python, WORKERS / side.script, settings | {"options": side.options}, caches(folder / name)
                )
            except WorkerFailedError as error:
                if name in OURS or name in ABLATIONS:
                    raise
                failed[name] = str(error)
                continue
            assert found["tokens"] == workload.tokens, f"{name} generated {found['tokens']} tokens"
            runs[name].append(found)
    done = {name: results for name, results in runs.items() if name not in failed}
    check_sampling(done, workload.tokens)
    return {"failed": failed, "sides": {name: combine(results, workload.tokens) for name, results in done.items()}}


def check_sampling(runs: dict[str, list[dict[str, Any]]], tokens: int) -> None:
    """Check that all sides sampled from the same distribution: their mean log-probs agree, except for chance."""
    means = {name: sum(run["mean_logprob"] for run in found) / len(found) for name, found in runs.items()}
    spread = max(means.values()) - min(means.values())
    assert spread < 0.02 + 4 / math.sqrt(tokens), f"mean log-probs of the sampled tokens differ: {means}"


def combine(results: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """Summarize one side's processes; compile time is that of the first, which started with empty caches."""
    seconds = median([s for result in results for s in result["seconds"]])
    compile_s = results[0]["compile_s"]
    return {
        "how": results[0]["how"],
        "seconds": seconds,
        "seconds_of_each_process": [median(result["seconds"]) for result in results],
        "tokens_per_s": round(tokens / seconds),
        "first_pass_s": median([result["first_pass_s"] for result in results]),
        "compile_s": round(compile_s, 4),
        "compile_cached_s": median([result["compile_s"] for result in results[1:]]) if results[1:] else None,
        "tokens_per_s_with_compile": round(tokens / (compile_s + seconds)),
        "load_s": median([result["load_s"] for result in results]),
        "mean_logprob": median([result["mean_logprob"] for result in results]),
        "peak_mib": round(max(result["peak_mib"] for result in results), 1),
    }


def machine_limit(workload: Workload, args: argparse.Namespace, large: float) -> dict[str, Any]:
    """Measured rates and the minimum time of a pass at these rates; ``large`` is the bandwidth of large buffers, bytes/s."""
    itemsize = 4 if args.dtype == "float32" else 2
    shape, work = workload.shape, (workload.prompts, workload.samples, workload.lengths, itemsize)
    rows = [len(workload.per_sample), min(sum(workload.prompts), 4096)]
    touched = limits.working_set(shape, *work)
    near = limits.measure_bandwidth(min(touched, limits.LARGE_BYTES), args.device)
    rates = limits.Rates(limits.measure_gemm(shape, rows, args.device, args.dtype), max(near, large))
    phases = limits.phases(shape, *work)
    seconds = rates.seconds(phases)
    return {
        "gemm_gflops": round(rates.flop / 1e9, 1),
        "gb_per_s": round(rates.bytes / 1e9, 1),
        "working_set_mib": round(touched / 2**20, 1),
        "gflop": round(sum(phase.flop for phase in phases) / 1e9, 1),
        "gb": round(sum(phase.bytes for phase in phases) / 1e9, 2),
        "seconds": round(seconds, 4),
        "tokens_per_s": round(workload.tokens / seconds),
    }


def ratios(sides: dict[str, Any]) -> dict[str, Any]:
    """How many times faster each side of areno is than each peer, excluding and including compile time."""
    rates = {"excluding_compile": "tokens_per_s", "including_compile": "tokens_per_s_with_compile"}
    return {
        ours: {
            peer: {kind: round(sides[ours][rate] / sides[peer][rate], 2) for kind, rate in rates.items()}
            for peer in OTHERS
            if peer in sides
        }
        for ours in OURS
        if ours in sides
    }


def measure(
    workload: Workload, sides: list[str], args: argparse.Namespace, large: float, folder: Path
) -> dict[str, Any]:
    """All results of one workload."""
    parameters = make_checkpoint(folder / "model", **asdict(workload.shape), dtype=args.dtype)
    limit = machine_limit(workload, args, large)
    found = run_sides(workload, sides, args, folder)
    for side in found["sides"].values():
        side["share_of_limit"] = round(limit["seconds"] / side["seconds"], 4)
    return {
        "parameters": parameters,
        "tokens": workload.tokens,
        "limit": limit,
        **found,
        "areno_over": ratios(found["sides"]),
    }


def show(name: str, found: dict[str, Any]) -> None:
    """Print the table of one workload."""
    limit = found["limit"]
    print(
        f"\n{name}: {found['tokens']:,} tokens, {found['parameters']:,} parameters; limit {limit['tokens_per_s']:,} tok/s"
    )
    print(
        f"  {'':<20}{'tok/s':>10}{'compile s':>11}{'with it':>10}{'of limit':>10}{'areno is':>10}{'with it':>9}{'MiB':>8}"
    )
    for side, row in found["sides"].items():
        over = found["areno_over"].get(next(iter(found["areno_over"])), {}).get(side, {})
        faster = "".join(
            f"{f'{over[kind]:.2f} x' if over else '':>{width}}"
            for kind, width in (("excluding_compile", 10), ("including_compile", 9))
        )
        rates = f"{row['tokens_per_s']:>10,}{row['compile_s']:>11.1f}{row['tokens_per_s_with_compile']:>10,}"
        print(f"  {side:<20}{rates}{row['share_of_limit']:>10.1%}{faster}{row['peak_mib']:>8,.0f}", flush=True)
    for side, error in found["failed"].items():
        print(f"  {side:<20} failed: {error.strip().splitlines()[-1]}")


def arguments() -> argparse.Namespace:
    """Parse the command line; contradictory options are refused before anything runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(workloads()), help="workloads; default: all for the device")
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=list(OTHERS),
        default=list(PEERS_BY_DEFAULT),
        help="default: all other programs that are present",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores given")
    parser.add_argument("--passes", type=int, default=3, help="timed passes of each process, after the first")
    parser.add_argument("--repeats", type=int, default=2, help="processes of each side")
    parser.add_argument("--save", default="", help="name of a file under benchmarks/results")
    args = parser.parse_args()
    args.dtype = "float32" if args.device == "cpu" else "bfloat16"
    fitting = [name for name, workload in workloads().items() if args.device in workload.devices]
    args.only = args.only or fitting
    if wrong := [name for name in args.only if name not in fitting]:
        parser.error(f"--only {' '.join(wrong)}: not for --device {args.device}; it has {', '.join(fitting)}")
    for option in ("threads", "passes", "repeats"):
        if getattr(args, option) < 1:
            parser.error(f"--{option} {getattr(args, option)}: at least 1")
    return args


def main() -> None:
    args = arguments()
    absent = {name: reason for name in args.peers if (reason := SIDES[name].missing(args.device))}
    sides = [*OURS, *(name for name in args.peers if name not in absent)]
    import torch

    torch.set_num_threads(args.threads)
    large = limits.measure_bandwidth(limits.LARGE_BYTES, args.device)
    settings = {name: getattr(args, name) for name in ("device", "dtype", "threads", "passes", "repeats")}
    result: dict[str, Any] = {"benchmark": "rollout", "machine": machine(), "settings": settings, "absent": absent}
    result["large_buffer_gb_per_s"] = round(large / 1e9, 1)
    for name, reason in absent.items():
        print(f"{name} is absent: {reason}")
    result["workloads"] = {}
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            found = result["workloads"][name] = measure(workloads()[name], sides, args, large, Path(folder))
        show(name, found)
    finish(result, args.save)


if __name__ == "__main__":
    main()
