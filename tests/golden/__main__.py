"""Compare whole runs of this source tree with those of another commit.

    python -m tests.golden --against main
    python -m tests.golden --against HEAD~3 --only train_sft

This creates a worktree of the other commit, executes every run of ``tests.golden.runs`` with both, and lists the differences:
any bit or, if rollout has its own processes, more than rounding. Both are recorded on this machine, because another processor
rounds sums differently.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import areno  # noqa: F401  (before torch)
from tests.golden.compare import differences
from tests.golden.runs import is_exact, make_data, record

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Return the exit code, which is 0 if all runs are the same."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--against", required=True, metavar="COMMIT", help="commit that the runs are compared with")
    parser.add_argument("--only", default="", metavar="TEXT", help="only runs whose names hold TEXT")
    parser.add_argument("--keep", metavar="DIR", help="folder for the runs; those of an earlier commit are used again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        return _compare(options.against, options.only, Path(options.keep or scratch).resolve())


def _compare(commit: str, only: str, folder: Path) -> int:
    sha = _git("rev-parse", "--short", commit)
    data, before, after = folder / "toy", folder / sha, folder / "here"
    if not data.exists():
        make_data(data)
    failed = []
    if not before.exists():
        tree = folder / f"tree-{sha}"
        _git("worktree", "add", "--detach", str(tree), sha)
        try:
            failed += record(tree, data, before, only)
        finally:
            _git("worktree", "remove", "--force", str(tree))
    shutil.rmtree(after, ignore_errors=True)
    failed += record(ROOT, data, after, only)
    names = sorted(path.name for path in after.iterdir() if path.is_dir() and only in path.name)
    changes = [line for name in names for line in differences(name, before, after, is_exact(ROOT, name))]
    print("\n".join([f"{name}: failed" for name in failed] + changes) or f"{len(names)} runs are the same")
    return int(bool(failed or changes))


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
