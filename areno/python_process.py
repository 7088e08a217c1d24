"""The command and the environment for other Python processes that import the same modules as this one."""

import os
import sys


def python_command(python: str = sys.executable) -> list[str]:
    """Return a command that starts Python.

    The command has ``-P``, which keeps the working directory off the search path. Otherwise a file there, such as
    ``datasets.py``, would shadow a package that areno imports. If this process itself imports from the working
    directory, ``-P`` is omitted.
    """
    return [python] if {"", os.getcwd()} & set(sys.path) else [python, "-P"]


def search_path() -> dict[str, str]:
    """Return the environment variable ``PYTHONPATH`` with the module search path of this process."""
    return {"PYTHONPATH": os.pathsep.join(sys.path)}
