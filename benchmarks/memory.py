"""Measured peak memory of each phase of a run, compared with what ``areno plan`` predicts before anything is loaded.

    python benchmarks/memory.py                     # table, then one line of JSON
    python benchmarks/memory.py --save NAME         # also benchmarks/results/NAME.json
    python benchmarks/memory.py --models 210m --sets grpo
    python benchmarks/memory.py --models 210m --sets grpo --layouts dp2 tp2

Every combination of a model and a set of options runs in a fresh process through the real engine: load, rollout, scoring
with a reference, forward, backward, optimizer step. The peak is the high-water mark of the resident set over what the
process held after its imports, reset before each phase. With several ranks it is that of all ranks together: shared memory
counts once, and what they held before is planned and measured too, except what they share. While tensor-parallel ranks load,
it includes pages of the file that the kernel can reclaim. Models are random, in fp32 unless the set has another dtype.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, finish, machine, make_checkpoint, run_worker

WORKER = ROOT / "benchmarks/workers/memory_phases.py"
_WIDE = {"hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 64, "intermediate": 3072}
MODELS: dict[str, dict[str, Any]] = {
    "210m": {**_WIDE, "layers": 14, "vocab": 32000},
    "310m": {**_WIDE, "layers": 22, "vocab": 32000},
    "420m": {**_WIDE, "layers": 26, "vocab": 90000},
}
_RL = {"algo": "grpo", "batch_size": 2, "n_samples": 4, "mini_bs": 4, "max_prompt_tokens": 48, "max_new_tokens": 16}
SETS: dict[str, dict[str, Any]] = {
    "grpo": _RL,
    "grpo-8bit": {**_RL, "adam_8bit": True, "activation_checkpointing": False, "drop_rollout_state": True},
    "sft-long": {"algo": "sft", "batch_size": 4, "mini_bs": 2, "max_prompt_tokens": 128, "max_new_tokens": 128},
    "kl-bf16": {**_RL, "kl_coef": 0.1, "dtype": "bfloat16", "mini_bs": 8},
}
LAYOUTS: dict[str, dict[str, Any]] = {"1": {}, "dp2": {"world_size": 2}, "tp2": {"world_size": 2, "tp_size": 2}}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--layouts", nargs="+", default=["1"], choices=LAYOUTS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", default="")
    return parser.parse_args()


def compare(model: Path, options: dict[str, Any], threads: int) -> dict[str, Any]:
    """Planned and measured bytes by phase."""
    import areno  # noqa: F401
    from areno.config.all_train_options import TrainOptions
    from areno.engine.plan.memory_plan import make_plan

    run = TrainOptions(ckpt=str(model), device="cpu", **options)
    plan = make_plan(run)
    given = {"ckpt": str(model), "device": "cpu", **options}
    found = run_worker(sys.executable, WORKER, {"options": given, "threads": threads})
    phases = {}
    for phase in plan.phases:
        planned, measured = plan.of_all(phase), found["peaks"][phase.name]
        phases[phase.name] = {
            "planned_mib": round(planned / 2**20, 1),
            "measured_mib": round(measured / 2**20, 1),
            "planned_over_measured": round(planned / measured, 3),
        }
    return {
        "phases": phases,
        "before": found["before"],
        "parts": {p.name: p.parts for p in plan.phases},
        "run": dataclasses.asdict(run)["algo"],
    }


def main() -> None:
    args = arguments()
    report: dict[str, Any] = {"benchmark": "memory", "machine": machine(), "results": {}}
    worst = 1.0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ARENO_CACHE_DIR"] = str(Path(folder) / "cache")
        for name in args.models:
            model = Path(folder) / name
            parameters = make_checkpoint(model, **MODELS[name])
            for chosen, layout in itertools.product(args.sets, args.layouts):
                result = compare(model, SETS[chosen] | LAYOUTS[layout], args.threads)
                title = f"{name} {chosen}" if layout == "1" else f"{name} {chosen} {layout}"
                report["results"][title] = {"parameters": parameters, **result}
                for phase, figures in result["phases"].items():
                    ratio = figures["planned_over_measured"]
                    worst = max(worst, ratio, 1 / ratio)
                    print(
                        f"{title:20} {phase:10} planned {figures['planned_mib']:8.1f} MiB  "
                        f"measured {figures['measured_mib']:8.1f} MiB  ratio {ratio:.3f}",
                        flush=True,
                    )
    report["worst_ratio"] = round(worst, 3)
    finish(report, args.save)


if __name__ == "__main__":
    main()
