"""The index of ``samples.jsonl``, with a fixed-size entry per sample. To list all samples, a reader needs only the index.

The writer appends to ``samples.jsonl``, and then to ``samples.index``. If a run is killed between the two writes, the last
samples have no entry. A reader therefore scans the samples after the last entry.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from areno.storage.files import Opener, open_file, replacing
from areno.storage.json_lines import MAX_BYTES, as_float, records

ENTRY = np.dtype(
    [
        ("offset", "<u8"),  # byte position of the line in samples.jsonl
        ("length", "<u4"),  # bytes of the line, with its line break
        ("step", "<u4"),
        ("prompt", "<u4"),
        ("sample", "<u4"),
        ("tokens", "<u4"),  # length of the response
        ("reward", "<f8"),
        ("advantage", "<f4"),  # NaN if there is none
        ("flags", "<u1"),  # bits of FLAGS
    ]
)
"""An entry of the index; little-endian, without padding."""
FLAGS = {"first": 1, "best": 2, "worst": 4, "truncated": 8, "rows": 16}
"""Bits of ``flags``. ``first``, ``best`` and ``worst``: the sample was recorded because it is the first, best or worst of its
prompt's samples.

``truncated`` means that the response reached its maximum length. ``rows`` means that the record has the key ``rows``, which
contains the tokens.
"""
Entries = NDArray[np.void]
"""Index entries of shape [samples] and type ``ENTRY``, in file order."""


def index_path(samples: Path) -> Path:
    """Return the path of the index of a samples file."""
    return samples.with_suffix(".index")


def append_entries(samples: Path, rows: Sequence[Mapping[str, Any]], lines: Sequence[bytes], offset: int) -> None:
    """For each of the ``lines``, append an entry to the index.

    The ``lines`` are already in ``samples``, starting at byte ``offset``.

    If the index does not cover exactly the first ``offset`` bytes of ``samples``, the index is first rebuilt from these bytes.
    """
    path = index_path(samples)
    entries = _entries(rows, [len(line) for line in lines], offset)
    if _indexed_bytes(path) != offset:
        with open(samples, "rb") as file:
            _write(path, np.concatenate([_scan(file, 0, offset), entries]))
        return
    with open(path, "ab") as file:
        file.write(entries.tobytes())


def read_entries(samples: Path, opened: Opener = open_file) -> Entries:
    """Return the entries of all readable lines of a samples file; empty if the file is missing."""
    if not samples.exists():
        return np.zeros(0, ENTRY)
    with opened(samples) as file:
        size, indexed = file.seek(0, 2), _indexed(samples, opened)
        if _end(indexed) > size:
            indexed = indexed[:0]
        if _end(indexed) == size:
            return indexed
        return np.concatenate([indexed, _scan(file, _end(indexed), size)])


def keep_entries(samples: Path, step: int) -> None:
    """Drop the entries of steps after ``step``. The caller must first drop the lines of these steps from ``samples``."""
    path = index_path(samples)
    if not path.exists():
        return
    entries = _indexed(samples, open_file)
    kept = entries[entries["step"] <= step]
    kept["offset"] = np.concatenate([[0], kept["length"].cumsum()[:-1]]) if len(kept) else 0
    size = samples.stat().st_size if samples.exists() else 0
    if _end(kept) != size:
        path.unlink()
        kept = read_entries(samples)
    _write(path, kept)


def read_sample(file: BinaryIO, entry: Any, *, tokens: bool = True, text: str = "") -> dict[str, Any] | None:
    """Read the record of an entry from its samples file.

    Args:
        tokens: whether to return the key ``rows``, which contains the tokens. If False, the line is read only up to ``rows``,
            and ``text`` is ignored. But if ``rows`` does not begin in the first 64 KiB of the line, the whole line is read
            as if ``tokens`` were True.
        text: casefolded text that the line must contain.

    Returns:
        The record; None if the line lacks ``text``, or is damaged, missing, or longer than ``MAX_BYTES``.
    """
    length = int(entry["length"])
    if length > MAX_BYTES:
        return None
    try:
        file.seek(int(entry["offset"]))
        if not tokens:  # ``rows`` are most of the bytes
            head, marker, _ = file.read(min(length, _TEXT_BYTES)).partition(_ROWS)
            file.seek(int(entry["offset"]))
            if marker:
                with suppress(ValueError):  # the marker may be a key within a message
                    return _object(head.decode() + "}")
        line = file.read(length).decode(errors="replace")
        return None if text and text not in line.casefold() else _object(line)
    except (ValueError, OverflowError, RecursionError):
        return None


def left_out(entries: Entries, size: int) -> int:
    """Return the total size in bytes of the lines that have no index entry because they are damaged or too long.

    ``size`` is the size of the samples file in bytes.
    """
    between = _end(entries) - int(entries["length"].sum(dtype=np.int64))
    behind = size - _end(entries)  # a short remainder is a line that is being written
    return max(between, 0) + (behind if behind > MAX_BYTES else 0)


def _object(text: str) -> dict[str, Any] | None:
    value = json.loads(text)
    return value if isinstance(value, dict) else None


def _entries(rows: Sequence[Mapping[str, Any]], lengths: Sequence[int], offset: int) -> Entries:
    entries = np.zeros(len(rows), ENTRY)
    for index, (record, length) in enumerate(zip(rows, lengths, strict=True)):
        advantage = record.get("advantage")
        flags = sum(FLAGS[reason] for reason in record.get("picked", ()) if reason in FLAGS)
        flags |= FLAGS["truncated"] if record.get("finish_reason") == "length" else 0
        flags |= FLAGS["rows"] if "rows" in record else 0
        numbers = (record["step"], *(int(record.get(name) or 0) for name in _COUNTS), as_float(record.get("reward")))
        entries[index] = (offset, length, *numbers, np.nan if advantage is None else as_float(advantage), flags)
        offset += length
    return entries


_TEXT_BYTES = 65536
_ROWS = b', "rows": [['  # quotes within a text are escaped
_COUNTS = ("prompt_index", "sample_index", "response_len")


def _scan(file: BinaryIO, start: int, stop: int) -> Entries:
    """Return the entries of the complete records between two byte positions."""
    parts: list[Entries] = []
    file.seek(start)
    for length, record in records(file):
        if start >= stop:
            break
        if record is not None:
            with suppress(TypeError, ValueError, OverflowError):  # values that areno does not write
                parts.append(_entries([record], [length], start))
        start += length
    return np.concatenate([np.zeros(0, ENTRY), *parts])


def _indexed(samples: Path, opened: Opener) -> Entries:
    """Return the entries of the index.

    The index is not memory-mapped, because this process would crash if another process truncated the index.
    """
    path = index_path(samples)
    if not path.exists():
        return np.zeros(0, ENTRY)
    with opened(path) as file:
        return np.fromfile(file, ENTRY)


def _indexed_bytes(path: Path) -> int:
    """Return the number of bytes of the samples file that the index at ``path`` covers; 0 without an index."""
    if not path.exists() or path.stat().st_size < ENTRY.itemsize:
        return 0
    with open(path, "rb") as file:
        file.seek((path.stat().st_size // ENTRY.itemsize - 1) * ENTRY.itemsize)
        return _end(np.frombuffer(file.read(ENTRY.itemsize), ENTRY))


def _end(entries: Entries) -> int:
    return int(entries[-1]["offset"]) + int(entries[-1]["length"]) if len(entries) else 0


def _write(path: Path, entries: Entries) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(entries.tobytes())
