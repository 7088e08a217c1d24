"""Experiments without agents do not need the packages of a server."""

from __future__ import annotations

import subprocess
import sys

_BLOCKED = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("uvicorn", "fastapi", "starlette", "prometheus_client", "httptools", "uvloop"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import areno
import areno.experiments.trainers
import areno.experiments.run_experiment
"""


def test_trainers_are_imported_without_server_packages() -> None:
    done = subprocess.run([sys.executable, "-c", _BLOCKED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
