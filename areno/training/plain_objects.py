"""Tensors, arrays and plain Python objects in a file that cannot run code when it is read.

The format is that of ``torch.save``; it is read with ``weights_only``, which knows a fixed list of types, and those here.
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

from areno.errors import CheckpointError, DamagedCheckpointError, UsageError

_DTYPES = [getattr(np.dtypes, name) for name in np.dtypes.__all__]
# What rows from JSON, Parquet, Arrow or a loader may hold beside what torch knows; none does more than hold a value.
_ALLOWED: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, uuid.UUID, uuid.SafeUUID, pathlib.PosixPath, frozenset),
    # The functions that make arrays and numbers have other names in other releases.
    *(np.ndarray, np.dtype, np.zeros(0).__reduce__()[0], np.float32(0).__reduce__()[0], *_DTYPES),
]


def save(value: Any, file: Path | IO[bytes]) -> None:
    """Write None, numbers, text, bytes, dates, tensors, arrays, and dicts, lists, tuples and sets of them.

    Raises UsageError: there is another type in it, which the message names.
    """
    try:
        torch.save(value, file)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(_refusal(str(error))) from error
    if not isinstance(file, Path):
        file.seek(0)
    with safe_globals(_ALLOWED):
        unknown = get_unsafe_globals_in_checkpoint(file)
    if unknown:
        raise UsageError(_refusal(", ".join(sorted(unknown))))


def check(value: Any) -> None:
    """Raise what :func:`save` would raise."""
    save(value, BytesIO())


def load(file: Path) -> Any:
    """Read what :func:`save` wrote; a :class:`DamagedCheckpointError` if it is something else."""
    try:
        with safe_globals(_ALLOWED):
            return torch.load(file, weights_only=True, map_location="cpu")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error})") from error
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise DamagedCheckpointError(f"{file} is not what was written ({str(error).splitlines()[0]})") from error


def _refusal(what: str) -> str:
    return (
        f"data rows and trajectories hold what a recovery point cannot keep: {what}; use text, numbers, dates, lists, "
        "dicts, tensors and arrays in them (the path of a file in place of an object), or set recover.mode=off"
    )
