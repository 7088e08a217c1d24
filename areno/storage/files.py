"""Opens files for reading, and replaces files atomically: a reader sees either the old or the new content."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

Opener = Callable[[Path], BinaryIO]
"""Opens a file for reading bytes; may raise an error to refuse the file."""


def open_file(path: Path) -> BinaryIO:
    """Open any file for reading bytes."""
    return open(path, "rb")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file to write. At the end of the block, this file replaces ``path``.

    After an error, ``path`` is unchanged.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
