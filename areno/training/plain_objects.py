"""Saves and loads tensors, arrays and plain Python objects. Loading never runs code from the file.

Files are written by ``torch.save``, and loaded by ``torch.load`` with ``weights_only``. The option ``weights_only`` allows
only types that are safe to load; this module allows a few more plain types.
"""

import datetime
import decimal
import pathlib
import pickle
import uuid
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from areno.errors import CheckpointError, DamagedCheckpointError, UsageError, first_line

_DTYPES = [getattr(np.dtypes, name) for name in np.dtypes.__all__]
# Further types that occur in rows from JSON, Parquet, Arrow or a loader; all are plain values.
_ALLOWED: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, uuid.UUID, uuid.SafeUUID, pathlib.PosixPath, frozenset),
    # The names of NumPy's reconstruction functions depend on its release.
    *(np.ndarray, np.dtype, np.zeros(0).__reduce__()[0], np.float32(0).__reduce__()[0], *_DTYPES),
]


def save(value: Any, file: Path | IO[bytes]) -> None:
    """Write a value to a file.

    Allowed types are None, numbers, text, bytes, dates, paths, UUIDs, tensors, arrays, dicts, lists, tuples and sets.

    Raises:
        UsageError: the value contains another type, which the message names.
        OSError: the file cannot be written.
    """
    try:
        torch.save(value, file)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(_refusal(str(error))) from error
    except RuntimeError as error:
        if "inline_container" not in str(error):  # PyTorch's writer of files
            raise
        raise OSError(f"writing {file} failed: {error}") from error
    if not isinstance(file, Path):
        file.seek(0)
    with safe_globals(_ALLOWED):
        unknown = get_unsafe_globals_in_checkpoint(file)
    if unknown:
        raise UsageError(_refusal(", ".join(sorted(unknown))))


def check(value: Any) -> None:
    """Raise UsageError if :func:`save` does not accept the value."""
    save(value, BytesIO())


def load(file: Path) -> Any:
    """Read a file that :func:`save` wrote.

    Raises DamagedCheckpointError if the content is invalid, and CheckpointError if the file is unreadable.
    """
    try:
        with safe_globals(_ALLOWED):
            return torch.load(file, weights_only=True, map_location="cpu")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error})") from error
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise DamagedCheckpointError(f"{file} is damaged ({first_line(error)})") from error


def _refusal(types: str) -> str:
    return (
        f"data rows or trajectories contain types that a checkpoint cannot store: {types}; use only text, numbers, dates, "
        "lists, dicts, tensors and arrays (for example a file path instead of an object). Alternatively, disable checkpoints: "
        "for `areno run`, set recover.mode=off and evaluator.keep_best=false"
    )
