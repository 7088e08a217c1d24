"""The process that builds a decode step, forked with its imports done: ``python -m tests.support.build SPEC PACKAGE PARENT``.

The one that forked it stands in for the parent with whom it ends.
"""

from __future__ import annotations

import os
import sys

from areno.engine.rollout.compiled import build

if __name__ == "__main__":
    sys.argv[3] = str(os.getppid())
    build.main()
