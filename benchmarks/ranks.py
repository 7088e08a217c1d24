"""Costs and benefits of a second rank: GRPO steps of one process with all cores, and of replicas that divide the cores.

    python benchmarks/ranks.py                       # table, then one line of JSON
    python benchmarks/ranks.py --save NAME           # also benchmarks/results/NAME.json
    python benchmarks/ranks.py --decode compiled     # generate with the compiled step, which is built before anything is timed

Each side is a fresh process: one rank with N threads, or N replicas with one thread each, on the same prompts, samples and
lengths. A step generates and trains, without scoring. ``overhead_share`` is the share of the step that serializing, sending
and deserializing rows and results takes: it is measured with the same messages to the same processes, for a method that does
nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import finish, machine, make_checkpoint, median, run_worker
from rollout import SMALL, TINY

WORKERS = Path(__file__).with_name("workers")
SHAPES = {"tiny": (TINY, 16, 8, 96), "small": (SMALL, 4, 8, 48)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each process, after the first")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each side")
    parser.add_argument("--decode", choices=["eager", "compiled"], default="eager", help="how both sides generate")
    parser.add_argument("--save", default="", help="name of a file under benchmarks/results")
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "ranks", "machine": machine(), "settings": vars(args), "models": {}}
    for name in args.only:
        shape, prompts, samples, new = SHAPES[name]
        with tempfile.TemporaryDirectory() as folder:
            parameters = make_checkpoint(Path(folder) / "model", **asdict(shape), dtype="float32")
            settings = {
                "model": str(Path(folder) / "model"),
                "prompts": prompts,
                "samples": samples,
                "new": new,
                "steps": args.steps,
                "decode": args.decode,
            }
            if args.decode == "compiled":
                run_worker(sys.executable, WORKERS / "areno_steps.py", {"build": True, "model": settings["model"]})
            sides: dict[str, list[dict[str, Any]]] = {"one": [], "replicas": []}
            for _ in range(args.repeats):
                for side, found in sides.items():
                    world = 1 if side == "one" else args.replicas
                    given = settings | {"world_size": world}
                    found.append(run_worker(sys.executable, WORKERS / "ranks_steps.py", given))
        found = {side: median([s for run in runs for s in run["seconds"]]) for side, runs in sides.items()}
        sent = median([run["messages_s"] for run in sides["replicas"]])
        result["models"][name] = {
            "seconds": found,
            "replicas_over_one": round(found["replicas"] / found["one"], 3),
            "messages_s": sent,
            "overhead_share": round(sent / found["replicas"], 4),
            "parameters": parameters,
            "bytes_of_a_train_call": sides["replicas"][0]["bytes_of_a_train_call"],
            "parts": {side: runs[0]["parts"] for side, runs in sides.items()},
        }
        print(
            f"{name}: one rank {found['one']:.3f} s a step, {args.replicas} replicas {found['replicas']:.3f} s "
            f"({found['replicas'] / found['one']:.2f} x); messages {sent / found['replicas']:.1%}",
            flush=True,
        )
    finish(result, args.save)


if __name__ == "__main__":
    main()
