"""The command and the environment for other Python processes that import the same modules as this process."""

import os
import sys


def python_command(python: str = sys.executable) -> list[str]:
    """Return a command that starts Python.

    The option ``-P`` removes the working directory from the search path. Without ``-P``, a file in this directory, such as
    ``datasets.py``, would shadow a package that areno imports. If this process imports from the working directory, ``-P`` is
    omitted.
    """
    return [python] if {"", os.getcwd()} & set(sys.path) else [python, "-P"]


def search_path() -> dict[str, str]:
    """Return the environment variable ``PYTHONPATH``, set to the module search path of this process."""
    return {"PYTHONPATH": os.pathsep.join(sys.path)}
