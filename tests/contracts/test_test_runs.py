"""How the tests themselves run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="only where workers share the tests out")
@pytest.mark.xdist_group("one")
def test_groups_of_tests_are_read(request):
    # Versions of pytest and pytest-xdist that do not fit ignore them silently: what is shared is made by every worker.
    assert request.node.nodeid.endswith("@one")


def test_lint_reads_the_projects_folders_and_nothing_that_lies_beside_them():
    said = subprocess.run(["make", "-n", "lint"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    checked = [set(line.split()) for line in said.splitlines() if "ruff" in line and "pip" not in line]
    assert len(checked) == 2
    for words in checked:
        assert {"areno", "benchmarks", "docs", "examples", "tests", "training"} <= words
        assert "." not in words
