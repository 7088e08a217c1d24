"""The C++ compiler of this machine."""

import os
import shlex
import sys


def compiler_command() -> list[str]:
    """Return the C++ compiler and its arguments, such as ``ccache g++``.

    The environment variable ``CXX`` replaces the default of the system.
    """
    return shlex.split(os.environ.get("CXX", "")) or ["clang++" if sys.platform == "darwin" else "g++"]
