"""Plant defects one at a time, and check whether the tests catch them.

    python -m tests.planted
    python -m tests.planted --only staleness
    python -m tests.planted --tests-from main

This copies the source tree to a temporary folder and runs there, for each defect, the tests that ``tests.planted.defects``
names. With ``--tests-from``, the tests are those of another commit. First, all of these tests run without any defect, because
a test that fails anyway proves nothing.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.planted.defects import DEFECTS, Defect

ROOT = Path(__file__).resolve().parents[2]
_PASSED, _FAILED = 0, 1  # exit codes of pytest; others mean that it could not run the tests
_TEST_TIMEOUT_S = 120


def main() -> int:
    """Return the exit code, which is 0 if all defects are caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="only defects whose name or file holds TEXT")
    parser.add_argument("--tests-from", metavar="COMMIT", help="take the tests of this commit")
    options = parser.parse_args()
    chosen = [defect for defect in DEFECTS if options.only in f"{defect.name} {defect.file}"]
    if not chosen:
        parser.error(f"--only {options.only}: there is no such defect")
    with tempfile.TemporaryDirectory(prefix="planted-") as scratch:
        copy = Path(scratch) / "tree"
        copy_tree(copy, options.tests_from)
        return _plant_all(copy, chosen)


def copy_tree(copy: Path, tests_from: str | None) -> None:
    """Copy all files that git does not ignore, with uncommitted changes; file times stay, so that compiled files are valid."""
    for name in _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").decode().split("\0"):
        if name and (ROOT / name).is_file() and not (tests_from and name.startswith("tests/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    if tests_from:
        with tarfile.open(fileobj=io.BytesIO(_git("archive", tests_from, "tests"))) as archive:
            archive.extractall(copy, filter="data")


def _plant_all(copy: Path, chosen: Sequence[Defect]) -> int:
    began = time.perf_counter()
    code, summary = _run(copy, list(dict.fromkeys(name for defect in chosen for name in defect.tests)))
    print(
        f"{_clock(began)} the tests without any defect: {'passed' if code == _PASSED else f'FAILED, {summary}'}",
        flush=True,
    )
    if code != _PASSED:
        return 1
    caught = 0
    for defect in chosen:
        began_one = time.perf_counter()
        verdict = _plant(copy, defect)
        caught += verdict.startswith("caught")
        print(f"{_clock(began_one)} {defect.name}: {verdict}", flush=True)
    print(f"{_clock(began)} {caught} of {len(chosen)} defects are caught")
    return int(caught < len(chosen))


def _plant(copy: Path, defect: Defect) -> str:
    """Run the tests of a defect with it in place, and return the verdict."""
    file = copy / defect.file
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    if text.count(defect.before) != 1:
        return f"does not apply: {defect.file} holds the line {text.count(defect.before)} times"
    file.write_text(text.replace(defect.before, defect.after), encoding="utf-8")
    try:
        code, summary = _run(copy, defect.tests)
    finally:
        shutil.copy2(ROOT / defect.file, file)
    if code == _FAILED:
        return f"caught by {summary}"
    return "NOT CAUGHT" if code == _PASSED else f"NOT CAUGHT, the tests did not run: {summary}"


def _run(copy: Path, tests: Sequence[str]) -> tuple[int, str]:
    """The exit code of pytest, and the failed test or the last line of the output."""
    planted = {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    data = {"ARENO_TEST_DATA": os.environ.get("ARENO_TEST_DATA", str(ROOT.parent / "shared" / "data"))}
    words = ["-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE", f"--timeout={_TEST_TIMEOUT_S}"]
    command = [sys.executable, "-m", "pytest", *words, *tests]
    ended = subprocess.run(command, cwd=copy, env=os.environ | data | planted, capture_output=True, text=True)
    lines = (ended.stdout + ended.stderr).strip().splitlines() or [""]
    return ended.returncode, next(
        (line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))), lines[-1]
    )


def _clock(began: float) -> str:
    return f"{time.perf_counter() - began:6.1f} s"


def _git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True).stdout


if __name__ == "__main__":
    sys.exit(main())
