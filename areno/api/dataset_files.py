"""Reads data files, and folders of data files, as ``datasets.Dataset`` objects.

The formats are JSON, JSONL, CSV, TSV, Parquet and Arrow. ``datasets.load_dataset`` keeps a cache, which can be out of
date; this module reads files into memory and keeps no cache. Error messages name the malformed row.
"""

from __future__ import annotations

import bisect
import csv
import json
import re
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areno.config.splits import TRAIN, saved_splits, split_files
from areno.errors import DataError, UsageError, first_line

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

_ROWS_PER_CHUNK = 20_000
_SHOWN_CHARS = 80
_INTEGER = re.compile(r"-?(0|[1-9]\d{0,17})")
_LONG_INTEGER = re.compile(r"-?\d{19,}")
_DECIMAL = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")


def read_file(path: Path, option: str) -> Dataset:
    """Read one data file. Raises UsageError for an unknown suffix, and DataError for a malformed file."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UsageError(
            f"{option} {path}: a data file must have one of the suffixes {', '.join(READERS)}, got "
            f"{path.suffix or 'no suffix'}"
        )
    return _to_dataset(reader(path), path)


def read_folder(folder: Path, option: str, split: str = TRAIN) -> Dataset:
    """Read one split of a ``save_to_disk`` folder, or of a folder with one or more data files per split."""
    if saved_splits(folder) is not None:
        return _read_saved(folder, option, split)
    files = split_files(folder, split, option)
    tables = [READERS[file.suffix.lower()](file) for file in files]
    return _to_dataset(_concatenate(tables, [str(file) for file in files]), folder)


def _read_saved(folder: Path, option: str, split: str) -> Dataset:
    from datasets import DatasetDict, load_from_disk

    try:
        loaded = load_from_disk(str(folder))
    except Exception as error:  # damaged files raise errors of many types
        raise DataError(
            f"{folder}: the dataset that save_to_disk wrote to this folder is damaged: {first_line(error)}; save the "
            "dataset again"
        ) from error
    if not isinstance(loaded, DatasetDict):
        return loaded
    if split not in loaded:
        raise UsageError(
            f"{option} {folder}: the dataset has no split `{split}`; pass the subfolder of one of its splits: "
            f"{', '.join(sorted(loaded))}"
        )
    return loaded[split]


def _read_json(path: Path) -> pa.Table:
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if content.lstrip()[:1] == b"[":
        try:
            rows = json.loads(content)
        except ValueError as error:
            raise DataError(f"{path}: the file is not valid JSON: {error}") from error
        numbered = ((number, row) for number, row in enumerate(rows, 1))
        return _table_of_rows(numbered, path, lambda number: f"row {number}")
    return _table_of_rows(_json_lines(content, path), path, lambda number: f"line {number}")


def _json_lines(content: bytes, path: Path) -> Iterator[tuple[int, Any]]:
    # Split at newlines only: JSON strings may contain other characters at which `splitlines` would split.
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except ValueError as error:
            hint = "" if number > 1 else "; write one array of objects, or one object per line"
            raise DataError(f"{path}, line {number}: the line is not valid JSON: {error}{hint}") from error


def _table_of_rows(rows: Iterator[tuple[int, Any]], path: Path, locate: Callable[[int], str]) -> pa.Table:
    """Build a table with one column per key, in the order in which the keys first appear. Missing values are None."""

    def checked() -> Iterator[tuple[int, dict[str, Any]]]:
        for number, row in rows:
            if not isinstance(row, dict):
                raise DataError(
                    f"{path}, {locate(number)}: a row must be a JSON object with keys and values, got {_shown(row)}"
                )
            yield number, row

    remaining, tables, places = checked(), list[Any](), list[str]()
    while (chunk := list(islice(remaining, _ROWS_PER_CHUNK))) or not tables:
        tables.append(_table_of_chunk(chunk, path, locate))
        places.append(f"{path} ({locate(chunk[0][0])} to {locate(chunk[-1][0])})" if chunk else str(path))
    return _concatenate(tables, places)


def _table_of_chunk(chunk: list[tuple[int, dict[str, Any]]], path: Path, locate: Callable[[int], str]) -> pa.Table:
    import pyarrow as pa

    columns = {}
    for key in dict.fromkeys(key for _, row in chunk for key in row):
        values = [row.get(key) for _, row in chunk]
        try:
            columns[key] = pa.array(values)
        except _rejections() as error:
            position = _first_misfit(values)
            if _can_be_stored([values[position]]):
                problem, remedy = "whose type differs from that of earlier rows", "use the same type in every row"
            else:
                problem = "which Arrow cannot store"
                remedy = (
                    "make sure that the items of a list have one type, that integers have at most 64 bits, and that text is "
                    "valid Unicode"
                )
            raise DataError(
                f"{path}, {locate(chunk[position][0])}: key `{key}` has the value {_shown(values[position])}, {problem} "
                f"({first_line(error)}); {remedy}"
            ) from error
    return pa.table(columns)


def _first_misfit(values: list[Any]) -> int:
    """Return the index of the first value that Arrow cannot store in one column together with all earlier values."""
    return bisect.bisect_left(range(len(values)), True, key=lambda index: not _can_be_stored(values[: index + 1]))


def _can_be_stored(values: list[Any]) -> bool:
    import pyarrow as pa

    try:
        pa.array(values)
    except _rejections():
        return False
    return True


def _rejections() -> tuple[type[Exception], ...]:
    """Return the exceptions that Arrow raises for values that it cannot store in one column."""
    import pyarrow as pa

    return pa.ArrowException, OverflowError, UnicodeError


def _read_separated(path: Path, separator: str) -> pa.Table:
    import pyarrow as pa

    csv.field_size_limit(2**31 - 1)  # prompts may be longer than the default of 128 KiB
    rows: list[list[str]] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=separator, strict=True)
        try:
            header = next(reader, [])
            _check_header(header, path)
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    raise DataError(
                        f"{path}, row {len(rows) + 1} (line {reader.line_num}): the row has {len(row)} fields, but the "
                        f"header has {len(header)}; put fields that contain the separator in double quotes"
                    )
                rows.append(row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(
                f"{path}, row {len(rows) + 1} (line {reader.line_num}): {error}; encode the file as UTF-8, close each quoted "
                "field with a double quote, and write each double quote inside a quoted field twice"
            ) from error
    return pa.table({key: pa.array(_typed([row[i] for row in rows])) for i, key in enumerate(header)})


def _check_header(header: list[str], path: Path) -> None:
    duplicates = sorted({key for key in header if header.count(key) > 1})
    if not header or not all(header) or duplicates:
        problem = f"repeats the name {', '.join(duplicates)}" if duplicates else "lacks the name of a column"
        raise DataError(f"{path}: the first line must name the columns, but the first line {problem}")


def _typed(texts: list[str]) -> list[Any]:
    """Convert the texts of a column to numbers, if all texts are numbers without leading zeros.

    Empty texts become None. If a text is an integer of more than 18 digits, such as an id, the column remains text, so
    that no digit is lost.
    """
    filled = [text for text in texts if text]
    if any(_LONG_INTEGER.fullmatch(text) for text in filled):
        return [text or None for text in texts]
    for pattern, convert in ((_INTEGER, int), (_DECIMAL, float)):
        if filled and all(pattern.fullmatch(text) for text in filled):
            return [convert(text) if text else None for text in texts]
    return [text or None for text in texts]


def _read_parquet(path: Path) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path).read()
    except pa.ArrowException as error:
        raise DataError(
            f"{path}: the file is not a readable Parquet file: {first_line(error)}; write the file again"
        ) from error


def _read_arrow(path: Path) -> pa.Table:
    import pyarrow as pa

    try:
        with pa.OSFile(str(path)) as file:
            try:
                return pa.ipc.open_file(file).read_all()
            except pa.ArrowInvalid:
                file.seek(0)
                return pa.ipc.open_stream(file).read_all()
    except pa.ArrowException as error:
        raise DataError(
            f"{path}: the file is in neither Arrow's file format nor Arrow's stream format: {first_line(error)}; write the "
            "file again"
        ) from error


def _concatenate(tables: list[pa.Table], places: list[str]) -> pa.Table:
    import pyarrow as pa

    joined = tables[0]
    for table, place in zip(tables[1:], places[1:], strict=True):
        try:
            joined = pa.concat_tables([joined, table], promote_options="permissive")
        except pa.ArrowException as error:
            raise DataError(
                f"{place}: the columns do not match the columns of {places[0]}: {first_line(error)}; use the same type for "
                "a column in all rows"
            ) from error
    return joined


def _to_dataset(table: pa.Table, path: Path) -> Dataset:
    from datasets import Dataset

    try:
        # A random fingerprint: computing one would hash the whole table.
        return Dataset(table, fingerprint=uuid.uuid4().hex)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise DataError(
            f"{path}: the package `datasets` does not support the type of a column: {first_line(error)}; convert this column "
            "to another type"
        ) from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


READERS: dict[str, Callable[[Path], pa.Table]] = {
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
    ".csv": partial(_read_separated, separator=","),
    ".tsv": partial(_read_separated, separator="\t"),
    ".arrow": _read_arrow,
}
