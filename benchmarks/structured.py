"""The task of ``areno quickstart --real`` in TRL, trained for as long as areno's run, evaluated by the same program.

    areno quickstart --real --run-dir runs/real
    python benchmarks/structured.py runs/real --save NAME

Both sides train all weights of the same model in fp32 by GRPO, with the rows, reward, batch size, learning rate, temperature
and lengths of the run's config.yaml; other settings are the defaults of each side. ``--microbatch`` and ``--checkpointing``
choose how TRL divides a batch. The last line of output is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from common import PEERS, ROOT, finish, machine, run_worker

from areno.config.paths import base_of
from areno.storage.run_dir import RunDirectory

sys.path.insert(0, str(ROOT / "examples" / "structured"))
import evaluate


def training_minutes(run: Path) -> float:
    """Minutes from the start of the first step to the end of the last one."""
    steps = RunDirectory(run / "grpo").read_metrics()
    return (steps[-1]["time"] - steps[0]["time"] + steps[0]["train/step_wall_time_s"]) / 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of areno quickstart --real")
    parser.add_argument("--minutes", type=float, help="of TRL's training; default: as long as areno's")
    parser.add_argument("--microbatch", type=int, default=8, help="rows at once in TRL (default: %(default)s)")
    parser.add_argument("--checkpointing", action="store_true", help="let TRL recompute activations")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores given")
    parser.add_argument("--save", default="", help="name of a file under benchmarks/results")
    args = parser.parse_args()
    summary = json.loads((args.run / "summary.json").read_text(encoding="utf-8"))
    run = yaml.safe_load((args.run / "grpo" / "config.yaml").read_text(encoding="utf-8"))
    task, minutes = args.run / "task", args.minutes or training_minutes(args.run)
    rows = [json.loads(line) for line in (task / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]
    python = PEERS / "trl" / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "model": base_of(summary["model"]),
            "task": str(task.resolve()),
            "output": folder,
            "minutes": minutes,
            "weights": {
                name: float(weight) for name, weight in (part.split("=") for part in run["reward_weights"].split(","))
            },
            **{name: run[name] for name in ("batch_size", "n_samples", "temperature", "lr", "max_new_tokens")},
            "seed": summary["seed"],
            "threads": args.threads,
            "microbatch": args.microbatch,
            "checkpointing": args.checkpointing,
        }
        worker = ROOT / "benchmarks" / "workers" / "trl_structured.py"
        found = run_worker(python if python.exists() else sys.executable, worker, settings, deadline_s=7200)
        answers = evaluate.answers(folder, rows)
    sides = {
        "before": {"exact": summary["exact_before"]},
        "areno": {
            "exact": summary["exact_after"],
            "steps": summary["steps"],
            "seconds": training_minutes(args.run) * 60,
        },
        "trl": evaluate.score(answers, rows) | found,
    }
    result = {"benchmark": "structured", "machine": machine(), "rows": len(rows), "sides": sides}
    for name, side in sides.items():
        print(
            f"{name:<8} exact {side['exact']:.1%}, {side.get('steps', 0)} steps in {side.get('seconds', 0) / 60:.0f} min"
        )
    finish(result, args.save)


if __name__ == "__main__":
    main()
