"""Seconds per GRPO and per SFT step, areno against TRL: same model, data, lengths, threads and precision, in one run.

    bash benchmarks/peers.sh trl                    # once: TRL in .peers/trl
    python benchmarks/train_step.py                 # table, then one line of JSON
    python benchmarks/train_step.py --save NAME     # also benchmarks/results/NAME.json

Each side runs in fresh processes, interleaved; the first steps of each are not counted. Both compute in fp32,
sample at temperature 1 and generate exactly the same number of tokens. A step is the time from the end of one to the end
of the next, so everything a user waits for counts; both write TensorBoard events and recompute activations, as both do
by default. Peak memory is the largest resident set of the whole process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import PEERS, ROOT, finish, machine, make_checkpoint, median, problems, run_worker

ARENO = ROOT / "benchmarks/workers/areno_steps.py"
REWARD = "def reward_fn(record):\n    text = record.completion\n    return sum(c.isdigit() for c in text) / (1 + len(text))\n"


Side = tuple[str | Path, Path, dict[str, str]]
"""Interpreter, worker and environment."""

PAIR: dict[str, Side] = {
    "areno": (sys.executable, ARENO, {}),
    "trl": (PEERS / "trl/bin/python", ROOT / "benchmarks/workers/trl_steps.py", {}),
}


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of the workload."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--activation-checkpointing", action=argparse.BooleanOptionalAction, default=True)
    return parser


def write_task(folder: Path) -> tuple[Path, int]:
    """Write model, data and reward of the runs; returns the model and its number of parameters."""
    model = folder / "model"
    parameters = make_checkpoint(model)
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, problems(600))))
    (folder / "reward.py").write_text(REWARD)
    return model, parameters


def measure(
    algo: str, args: argparse.Namespace, folder: Path, model: Path, sides: dict[str, Side]
) -> dict[str, dict[str, Any]]:
    """Run all sides, interleaved; returns medians over all counted steps."""
    rows = args.prompts * args.samples
    settings = {
        "algo": algo,
        "folder": str(folder),
        "model": str(model),
        "steps": args.steps,
        "warmup": args.warmup,
        "threads": args.threads,
        "rows": rows,
        "prompts": args.prompts if algo == "grpo" else rows,
        "samples": args.samples,
        "new_tokens": args.new_tokens if algo == "grpo" else 1024,
        "checkpointing": args.activation_checkpointing,
        "options": {"mini_bs": rows, "activation_checkpointing": args.activation_checkpointing},
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for repeat in range(args.repeats):
        for name, (python, script, env) in sides.items():
            run_dir = folder / f"{algo}-{name}-{repeat}"
            runs[name].append(run_worker(python, script, {**settings, "run_dir": str(run_dir)}, env))
    return {name: combine(results) for name, results in runs.items()}


def combine(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of several runs of one side."""
    parts = sorted({part for result in results for part in result["split"]})
    return {
        "step_s": median([s for result in results for s in result["seconds"]]),
        "step_s_of_each_run": [median(result["seconds"]) for result in results],
        "split_s": {part: median([s for result in results for s in result["split"][part]]) for part in parts},
        "peak_mib": round(max(result["peak_mib"] for result in results), 1),
        "response_len": results[0]["response_len"],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--save", default="")
    args = parser.parse_args()
    if not (PEERS / "trl/bin/python").exists():
        sys.exit("TRL is not set up; run: bash benchmarks/peers.sh trl")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, parameters = write_task(folder)
        report: dict[str, Any] = {
            "benchmark": "train_step",
            "machine": machine(),
            "parameters": parameters,
            "settings": {k: v for k, v in vars(args).items() if k != "save"},
        }
        # Both sides are measured warm: TRL has nothing to compile, areno's decode step is on disk as after any longer run.
        os.environ["ARENO_CACHE_DIR"] = str(folder / "cache")
        built = run_worker(sys.executable, ARENO, {"build": True, "model": str(model)})
        report["decode_step_build_s"] = round(built["seconds"], 1)
        for algo in ("grpo", "sft"):
            sides: dict[str, Any] = measure(algo, args, folder, model, PAIR)
            sides["speed_ratio"] = round(sides["trl"]["step_s"] / sides["areno"]["step_s"], 2)
            sides["memory_ratio"] = round(sides["areno"]["peak_mib"] / sides["trl"]["peak_mib"], 2)
            report[algo] = sides
            for side in ("areno", "trl"):
                found = sides[side]
                print(
                    f"{algo:5} {side:6} {found['step_s']:8.3f} s/step  {found['peak_mib']:8.0f} MiB  {found['split_s']}"
                )
            print(
                f"{algo:5} TRL / areno: {sides['speed_ratio']} x the time, areno / TRL: {sides['memory_ratio']} x the memory"
            )
    finish(report, args.save)


if __name__ == "__main__":
    main()
