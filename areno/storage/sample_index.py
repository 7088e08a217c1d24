"""The index of ``samples.jsonl``: one fixed-size entry per sample, so that a file of a million samples opens at once.

The writer appends to ``samples.index`` after each append to ``samples.jsonl``. If the index lacks entries
(because a run was killed between the two appends, or wrote no index), a reader scans the rest of the samples.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areno.storage.json_lines import as_float, parse_record

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
"""Bits of ``flags``: why the sample was recorded, whether its response was truncated, whether its tokens are recorded."""
Entries = NDArray[np.void]
"""Entries [samples] of type ``ENTRY``, in file order."""


def index_path(samples: Path) -> Path:
    """Return the path of a samples file's index."""
    return samples.with_suffix(".index")


def append_entries(samples: Path, records: Sequence[Mapping[str, Any]], lines: Sequence[bytes], offset: int) -> None:
    """Append the entries of ``lines``, which were appended to ``samples`` at byte ``offset``.

    An index that does not end at ``offset`` is first rebuilt from the samples before it.
    """
    path = index_path(samples)
    entries = _entries(records, lines, offset)
    if _indexed_bytes(path) != offset:
        _write(path, np.concatenate([_scan(samples, 0, offset), entries]))
        return
    with open(path, "ab") as file:
        file.write(entries.tobytes())


def read_entries(samples: Path) -> Entries:
    """Return the entries of all complete lines of a samples file; none if there is no file."""
    if not samples.exists():
        return np.zeros(0, ENTRY)
    size, path = samples.stat().st_size, index_path(samples)
    indexed = np.zeros(0, ENTRY)
    if path.exists() and 0 < _indexed_bytes(path) <= size:
        indexed = np.memmap(path, ENTRY, mode="r", shape=(path.stat().st_size // ENTRY.itemsize,))
    covered = _end(indexed)
    if covered == size:
        return indexed
    return np.concatenate([indexed, _scan(samples, covered, size)])


def keep_entries(samples: Path, step: int) -> None:
    """Drop the entries of steps after ``step``. The lines of these steps must have been dropped from ``samples`` before."""
    path = index_path(samples)
    if not path.exists():
        return
    entries = np.fromfile(path, ENTRY, count=path.stat().st_size // ENTRY.itemsize)
    kept = entries[entries["step"] <= step]
    kept["offset"] = np.concatenate([[0], kept["length"].cumsum()[:-1]]) if len(kept) else 0
    size = samples.stat().st_size if samples.exists() else 0
    _write(path, kept if _end(kept) == size else _scan(samples, 0, size))


def read_sample(samples: Path, entry: Any, *, tokens: bool = True) -> dict[str, Any]:
    """Read the record of an entry; without ``tokens``, only the fields before ``rows``, which has most of the bytes."""
    length = int(entry["length"])
    with open(samples, "rb") as file:
        file.seek(int(entry["offset"]))
        line = file.read(length if tokens else min(length, _TEXT_BYTES))
        head, marker, _ = line.partition(_ROWS)
        try:
            record: dict[str, Any] = json.loads(head + b"}" if marker and not tokens else line)
        except ValueError:  # the texts are longer, or a message has a key "rows"
            file.seek(int(entry["offset"]))
            record = json.loads(file.read(length))
        return record


def _entries(records: Sequence[Mapping[str, Any]], lines: Sequence[bytes], offset: int) -> Entries:
    entries = np.zeros(len(records), ENTRY)
    for index, (record, line) in enumerate(zip(records, lines, strict=True)):
        advantage = record.get("advantage")
        flags = sum(FLAGS[reason] for reason in record.get("picked", ()) if reason in FLAGS)
        flags |= FLAGS["truncated"] if record.get("finish_reason") == "length" else 0
        flags |= FLAGS["rows"] if "rows" in record else 0
        numbers = (record["step"], *(int(record.get(name) or 0) for name in _COUNTS), as_float(record.get("reward")))
        entries[index] = (offset, len(line), *numbers, np.nan if advantage is None else as_float(advantage), flags)
        offset += len(line)
    return entries


_TEXT_BYTES = 65536
_ROWS = b', "rows": [['  # quotes within a text are escaped
_COUNTS = ("prompt_index", "sample_index", "response_len")


def _scan(samples: Path, start: int, stop: int) -> Entries:
    """Return the entries of the complete records between two byte positions."""
    parts: list[Entries] = []
    with open(samples, "rb") as file:
        file.seek(start)
        while file.tell() < stop:
            offset, line = file.tell(), file.readline()
            if record := parse_record(line):
                with suppress(TypeError, ValueError, OverflowError):  # values that areno does not write
                    parts.append(_entries([record], [line], offset))
    return np.concatenate([np.zeros(0, ENTRY), *parts])


def _indexed_bytes(path: Path) -> int:
    """Return how many bytes of the samples file an index covers; 0 without an index."""
    if not path.exists() or path.stat().st_size < ENTRY.itemsize:
        return 0
    with open(path, "rb") as file:
        file.seek((path.stat().st_size // ENTRY.itemsize - 1) * ENTRY.itemsize)
        return _end(np.frombuffer(file.read(ENTRY.itemsize), ENTRY))


def _end(entries: Entries) -> int:
    return int(entries[-1]["offset"]) + int(entries[-1]["length"]) if len(entries) else 0


def _write(path: Path, entries: Entries) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(entries.tobytes())
    temporary.replace(path)
