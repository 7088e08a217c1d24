"""How the tests themselves run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="needs workers of pytest-xdist")
@pytest.mark.xdist_group("one")
def test_groups_of_tests_are_respected(request):
    # Incompatible versions of pytest and pytest-xdist silently ignore groups, so that every worker creates shared fixtures.
    assert request.node.nodeid.endswith("@one")


def test_lint_checks_the_folders_of_the_project_and_no_others():
    output = subprocess.run(["make", "-n", "lint"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    checked = [set(line.split()) for line in output.splitlines() if "ruff" in line and "pip" not in line]
    assert len(checked) == 2
    for words in checked:
        assert {"areno", "benchmarks", "docs", "examples", "tests", "training"} <= words
        assert "." not in words
