"""Writes the repair tasks of ``bugs.py`` as JSON lines, such as ``dataset.jsonl`` in this folder.

python examples/agentic/coding/dataset_generator.py --output examples/agentic/coding/dataset.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from bugs import BUGS, Bug
from coding import Repair
from sandbox import Sandbox


def test_file(bug: Bug) -> str:
    """Return the tests of a bug as the source of a test file."""
    methods = "".join(f"\n    def test_{name}(self):\n        {line}\n" for name, line in bug.tests.items())
    return f"import unittest\n\nfrom {bug.name} import *\n\n\nclass Test(unittest.TestCase):{methods}"


def make_record(bug: Bug) -> dict[str, Any]:
    """Return the task of a bug. The function runs the tests to find out which tests the bug breaks."""
    module, tests = {"path": f"{bug.name}.py", "content": bug.wrong}, test_file(bug)
    record: dict[str, Any] = {
        "instance_id": f"areno__{bug.name}",
        "problem_statement": bug.report,
        "difficulty": bug.difficulty,
        "max_turns": 8,
        "files": [module, {"path": f"test_{bug.name}.py", "content": tests}],
        "test_commands": ["python -m unittest"],
        "FAIL_TO_PASS": [],
        "PASS_TO_PASS": [],
    }
    passed = asyncio.run(_passing(record))
    for name in bug.tests:
        record["PASS_TO_PASS" if f"test_{name}" in passed else "FAIL_TO_PASS"].append(f"test_{name}")
    return record


async def _passing(record: dict[str, Any]) -> set[str]:
    task = Repair(Sandbox())
    task.reset(record)
    return await task.passing_tests()


def main() -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=Path, help="JSON lines file to write")
    output = parser.parse_args().output
    output.write_text("".join(json.dumps(make_record(bug)) + "\n" for bug in BUGS), encoding="utf-8")
    print(f"{len(BUGS)} tasks in {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
