"""How long a new user waits: from the command to the first eagerly decoded token, and until the compiled step takes over.

    python benchmarks/first_token.py             # table, then one line of JSON
    python benchmarks/first_token.py --save NAME

Each measurement is a fresh process with the tiny model of ``rollout.py``. ``imports`` is the time to import Python
packages, ``first token`` the time after that: loading and validating the checkpoint, prefill and one token. Then the step is
compiled once (``build``), and further processes report when the step from disk takes over.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, finish, machine, make_checkpoint, median, run_worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", default="")
    args = parser.parse_args()
    script = ROOT / "benchmarks" / "workers" / "first_token.py"
    result: dict[str, Any] = {"benchmark": "first_token", "machine": machine(), "repeats": args.repeats}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ARENO_CACHE_DIR"] = str(Path(folder) / "cache")
        model = Path(folder) / "model"
        make_checkpoint(model)
        settings = {"model": str(model), "decode": "eager"}
        runs = [run_worker(sys.executable, script, settings) for _ in range(args.repeats)]
        for name in ("imports_s", "first_token_s"):
            result[name] = median([run[name] for run in runs])
        result["build_s"] = run_worker(sys.executable, script, {**settings, "decode": "compiled"})["ready_s"]
        warm = [run_worker(sys.executable, script, {**settings, "decode": "auto"}) for _ in range(args.repeats)]
        result["warm_switch_after_first_step_s"] = median([run["switch_s"] for run in warm])
    for name, value in result.items():
        if name.endswith("_s"):
            print(f"{name:<34}{value:>9.3f}")
    finish(result, args.save)


if __name__ == "__main__":
    main()
