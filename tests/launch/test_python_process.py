"""Processes that areno starts import what this process imports, and not what happens to be in the working directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import areno

# Prints which file a child process imports, or the last line of its error.
STARTS = """
import os, subprocess, sys
from areno.python_process import python_command, search_path
words = [*python_command(), "-c", "import own; print(own.__file__)"]
done = subprocess.run(words, env={**os.environ, **search_path()}, capture_output=True, text=True)
print(done.stdout or done.stderr.strip().splitlines()[-1])
"""


@pytest.mark.parametrize(("flags", "imported"), [(["-P"], False), ([], True)])
def test_a_file_in_the_working_directory_is_imported_only_if_this_process_would(tmp_path: Path, flags, imported):
    (tmp_path / "own.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": str(Path(areno.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, *flags, "-c", STARTS],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = str(tmp_path / "own.py") if imported else "ModuleNotFoundError: No module named 'own'"
    assert done.stdout.strip() == expected
