"""Gate against regressions: training steps of this checkout against those of another commit, in one run on one machine.

    python benchmarks/regression.py                    # against the commit before this one
    python benchmarks/regression.py --base v0.1.0      # against a tag or commit

Fails if a step takes more than 15 % longer or 10 % more memory. Each run adds a line to ``benchmarks/results/history.jsonl``,
which is committed with a release. Both sides use the same packages; each runs in fresh processes, interleaved.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, git, machine, run_worker
from train_step import ARENO, Side, measure, parser_of, write_task

HISTORY = ROOT / "benchmarks/results/history.jsonl"
SLOWER, LARGER = 1.15, 1.10


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--base", default="HEAD~1", help="commit to compare with (default: HEAD~1)")
    parser.add_argument("--no-history", action="store_true", help="do not add a line to the history")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = folder / "base"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", base, args.base], cwd=ROOT, check=True)
        try:
            entry = compare(args, folder, base)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", base], cwd=ROOT, check=True)
    if not args.no_history:
        with HISTORY.open("a") as file:
            file.write(json.dumps(entry) + "\n")
    print(json.dumps(entry))
    sys.exit("; ".join(entry["regressions"]) or 0)


def environment(tree: Path, cache: Path) -> dict[str, str]:
    """Environment of one side, with its checkout and cache folder."""
    # Without PYTHONSAFEPATH, a process that a side starts with `python -m` would import areno from the working directory.
    return {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1", "ARENO_CACHE_DIR": str(cache)}


def compare(args: Any, folder: Path, base: Path) -> dict[str, Any]:
    """Ratios of this checkout to the base, and which of them are regressions."""
    sides: dict[str, Side] = {
        # The workers of this checkout, because those of an old one may not know the settings.
        name: (sys.executable, ARENO, environment(tree, folder / f"cache-{name}"))
        for name, tree in (("base", base), ("head", ROOT))
    }
    entry: dict[str, Any] = {"machine": machine(), "base": git("describe", "--always", args.base), "regressions": []}
    model, _ = write_task(folder)
    for python, script, env in sides.values():
        run_worker(python, script, {"build": True, "model": str(model)}, env)
    for algo in ("grpo", "sft"):
        found = measure(algo, args, folder, model, sides)
        ratios = {
            "time": found["head"]["step_s"] / found["base"]["step_s"],
            "memory": found["head"]["peak_mib"] / found["base"]["peak_mib"],
        }
        entry[algo] = {**{what: round(ratio, 3) for what, ratio in ratios.items()}, "step_s": found["head"]["step_s"]}
        for what, most in (("time", SLOWER), ("memory", LARGER)):
            print(f"{algo:5} {what:7} {ratios[what]:.3f} x that of {args.base}", flush=True)
            if ratios[what] > most:
                entry["regressions"].append(
                    f"{algo} takes {ratios[what]:.2f} x the {what} of {args.base} (at most {most})"
                )
    return entry


if __name__ == "__main__":
    main()
