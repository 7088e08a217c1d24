"""Opens files for reading, and replaces files atomically: a reader sees either the old or the new content."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

Opener = Callable[[Path], BinaryIO]
"""Function that opens a file for reading bytes, or raises an error if the file must not be read."""


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading bytes. This is the default :data:`Opener`, which accepts every path."""
    return open(path, "rb")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file to write, which replaces ``path`` at the end of the block.

    If the block raises an error, ``path`` is unchanged.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
