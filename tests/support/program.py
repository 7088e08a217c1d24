"""A forked program whose ranks are forked, too: ``python -m tests.support.program MODULE_OR_FILE ARGUMENTS``."""

from __future__ import annotations

import runpy
import sys

from areno.launch import local
from tests.support.cli import forked_rank

if __name__ == "__main__":
    del sys.argv[0]
    local.start_process = forked_rank
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
