"""How areno starts other Python processes, so that they import the same modules as this one."""

import os
import sys


def python_command(python: str = sys.executable) -> list[str]:
    """Return a command that starts Python; ``-P`` is added unless this process itself imports from the working directory.

    Without ``-P``, a file in the working directory, such as ``datasets.py``, would shadow a package that areno imports.
    """
    return [python] if {"", os.getcwd()} & set(sys.path) else [python, "-P"]


def search_path() -> dict[str, str]:
    """Return the environment variable ``PYTHONPATH``, with the folders in which this process searches for modules."""
    return {"PYTHONPATH": os.pathsep.join(sys.path)}
