"""Opens files of runs, but only regular files inside the viewed folder."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from areno.serving.errors import ApiError
from areno.storage.files import Opener
from areno.storage.json_lines import MAX_BYTES

_READ_WHOLE = (".json", ".yaml")
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe does not block


def opener(folder: Path) -> Opener:
    """Return a function that opens a file inside a folder.

    The function raises ApiError if the file is outside the folder, is not a regular file, or is a JSON or YAML file of more
    than ``MAX_BYTES``.

    Args:
        folder: the viewed folder, with symbolic links resolved.
    """

    def opened(path: Path) -> BinaryIO:
        try:
            descriptor = _open_below(folder, path.resolve().relative_to(folder))
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                raise
            raise _refusal(path) from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise _refusal(path)
        if path.suffix in _READ_WHOLE and status.st_size > MAX_BYTES:
            os.close(descriptor)
            raise ApiError(
                403, f"{path.name} of this run is larger than the limit of {MAX_BYTES} bytes", code="file_too_large"
            )
        return open(descriptor, "rb")

    return opened


def _open_below(folder: Path, path: Path) -> int:
    """Open a file below a folder without following links.

    A folder in ``path`` may have been replaced by a link after ``path`` was resolved.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    for part in path.parts:
        outer = descriptor
        try:
            descriptor = os.open(part, _FLAGS, dir_fd=outer)
        finally:
            os.close(outer)
    return descriptor


def _refusal(path: Path) -> ApiError:
    message = f"{path.name} of this run is not a regular file, or is outside the viewed folder"
    return ApiError(403, message, code="outside_folder")
