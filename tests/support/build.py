"""The process that builds a decode step, forked with its imports done: ``python -m tests.support.build SPEC PACKAGE PARENT``.

It ends with the process that forked it, instead of with PARENT.
"""

from __future__ import annotations

import os
import sys

from areno.engine.rollout.compiled import build

if __name__ == "__main__":
    sys.argv[3] = str(os.getppid())
    build.main()
