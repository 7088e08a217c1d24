"""How areno starts further Python processes, so that they import the same modules as this one."""

import os
import sys


def python_command(python: str = sys.executable) -> list[str]:
    """Command of a Python that searches the working directory for modules only if this process does (``python -m areno``).

    Otherwise a file there, such as ``datasets.py``, would replace a package that areno imports.
    """
    return [python] if {"", os.getcwd()} & set(sys.path) else [python, "-P"]


def search_path() -> dict[str, str]:
    """Environment variable with the folders in which this process searches for modules."""
    return {"PYTHONPATH": os.pathsep.join(sys.path)}
