"""The C++ compiler of this machine."""

import os
import shlex
import sys


def compiler_command() -> list[str]:
    """Return the compiler and its arguments, such as ``ccache g++``: ``CXX``, or the default of the system."""
    return shlex.split(os.environ.get("CXX", "")) or ["clang++" if sys.platform == "darwin" else "g++"]
