"""Writes and reads the files of a run directory.

    config.yaml  environment.json  status.json  metrics.jsonl  samples.jsonl  samples.index  eval_samples.jsonl
    warnings.jsonl  log.txt  events/  checkpoints/  rollouts/  summary.json  report.html

Each line of the ``.jsonl`` files is valid JSON, in which NaN and infinity are strings. A method that writes lines returns only
when the operating system has received the lines. A killed run may have written steps after its last checkpoint.
``truncate_after`` removes these steps, so that a resumed run does not write the steps twice.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areno.errors import ArenoError, UsageError
from areno.storage.files import Opener, open_file, replacing
from areno.storage.json_lines import MAX_BYTES, NON_FINITE, parse_record, records
from areno.storage.rollout_files import RolloutFiles
from areno.storage.run_layout import CONFIG, OPTIONS, RunLayout
from areno.storage.sample_index import Entries, append_entries, index_path, keep_entries, read_entries, read_sample


class RunDirectory:
    """The files of one run. Methods that write a file raise ArenoError on failure.

    Args:
        layout: paths that differ between ``areno train`` and ``areno run``.
        opened: function that opens a file for reading.
    """

    def __init__(self, path: str | Path, layout: RunLayout = OPTIONS, opened: Opener = open_file) -> None:
        self.path, self.open = Path(path), opened
        self.config_path = self.path / CONFIG
        self.events_path = self.path / "events"
        self.metrics_path = self.path / "metrics.jsonl"
        self.samples_path = self.path / "samples.jsonl"
        self.eval_samples_path = self.path / "eval_samples.jsonl"
        self.warnings_path = self.path / "warnings.jsonl"
        self.environment_path = self.path / "environment.json"
        self.status_path = self.path / "status.json"
        self.report_path = self.path / "report.html"
        self.checkpoints_path = self.path / "checkpoints"
        self.rollouts_path = self.path / "rollouts"
        self.log_path = self.path / layout.log
        self.summary_path = self.path / "summary.json"

    def create(self, remedy: str = "choose another directory with --run-dir") -> RunDirectory:
        """Create the run directory, ``events`` and ``checkpoints`` if they are missing, and return ``self``.

        Raises UsageError if a directory cannot be created. The message ends with ``remedy``.
        """
        try:
            for directory in (self.path, self.events_path, self.checkpoints_path):
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"run directory {self.path}: cannot create {error.filename or self.path} ({error.strerror or error}); {remedy}"
            ) from error
        return self

    def write_config(self, text: str) -> None:
        """Atomically replace ``config.yaml``. The new file is readable only by its owner, because it may contain secrets."""
        _replace(self.config_path, [text.encode()], mode=0o600)

    def append_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Append ``{"step": step, "time": Unix seconds, **values}`` to ``metrics.jsonl``."""
        _append(self.metrics_path, [{"step": step, "time": time.time(), **values}])

    def append_samples(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append a line per record to ``samples.jsonl``. Raises ValueError for a record without ``step``."""
        rows = list(records)
        if any("step" not in row for row in rows):
            raise ValueError("every sample record needs a `step`; use areno.observability.samples.sample_records")
        lines = [_line(row) for row in rows]
        with _writing(self.samples_path):
            append_entries(self.samples_path, rows, lines, _append_lines(self.samples_path, lines))

    def append_eval_samples(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append a line per record to ``eval_samples.jsonl``."""
        _append(self.eval_samples_path, records)

    def append_warning(self, step: int, text: str) -> None:
        """Append ``{"step": step, "time": Unix seconds, "text": text}`` to ``warnings.jsonl``."""
        _append(self.warnings_path, [{"step": step, "time": time.time(), "text": text}])

    def write_environment(self, values: Mapping[str, Any]) -> None:
        """Atomically replace ``environment.json``."""
        self._write_json(self.environment_path, values)

    def write_status(self, values: Mapping[str, Any]) -> None:
        """Atomically replace ``status.json``."""
        self._write_json(self.status_path, values)

    def write_report(self, html: str) -> None:
        """Atomically replace ``report.html``."""
        _replace(self.report_path, [html.encode(errors="replace")])

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """Atomically replace ``summary.json``."""
        self._write_json(self.summary_path, values)

    @staticmethod
    def _write_json(path: Path, values: Mapping[str, Any]) -> None:
        _replace(path, [json.dumps(json_safe(values), indent=2, allow_nan=False).encode(), b"\n"])

    def truncate_after(self, step: int) -> int:
        """In the ``.jsonl`` files, delete incomplete lines and the lines of all steps after ``step``.

        Also delete the saved rollouts of these steps. Return the number of deleted lines.

        Steps are numbered from 0. In ``eval_samples.jsonl``, an evaluation is recorded under the number of completed steps. The
        evaluation after ``step`` is therefore recorded under ``step + 1``, and is kept. Exception: if ``step`` is -1, all lines
        of this file are deleted, because the run repeats the evaluation before the first step.
        """
        dropped = sum(_keep_until(path, step) for path in (self.metrics_path, self.samples_path, self.warnings_path))
        with _writing(self.samples_path):
            keep_entries(self.samples_path, step)
            RolloutFiles(self.rollouts_path, 0).drop_after(step)
        return dropped + _keep_until(self.eval_samples_path, step + 1 if step >= 0 else step)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the records of the complete lines of ``metrics.jsonl`` in order, with NaN and infinities as floats."""
        return [
            {key: NON_FINITE.get(value, value) if isinstance(value, str) else value for key, value in record.items()}
            for record in self._read(self.metrics_path)
        ]

    def read_eval_samples(self) -> Iterator[dict[str, Any]]:
        """Yield the records of ``eval_samples.jsonl`` in order."""
        return self._read(self.eval_samples_path)

    def read_warnings(self) -> Iterator[dict[str, Any]]:
        """Yield the records of ``warnings.jsonl`` in order."""
        return self._read(self.warnings_path)

    def read_json(self, path: Path) -> dict[str, Any]:
        """Return the JSON object in a file, such as ``status.json``; {} if the file is missing or unreadable."""
        try:
            with self.open(path) as file:
                content = json.loads(file.read(MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def read_samples(self) -> Iterator[dict[str, Any]]:
        """Yield the records of the complete lines of ``samples.jsonl`` in order."""
        return self._read(self.samples_path)

    def read_entries(self) -> Entries:
        """Return the index entries of all recorded samples."""
        return read_entries(self.samples_path, self.open)

    def read_sample(self, entry: Any, *, tokens: bool = True) -> dict[str, Any]:
        """Return the record of an index entry. If ``tokens`` is False, the record may lack ``rows``, which contains the tokens.

        Raises ArenoError if the record cannot be read.
        """
        with self.open(self.samples_path) as file:
            record = read_sample(file, entry, tokens=tokens)
        if record is None:
            index = index_path(self.samples_path)
            raise ArenoError(
                f"{self.samples_path}: the sample at byte {entry['offset']} is damaged, or its {entry['length']} bytes exceed "
                f"the limit of {MAX_BYTES}; if the index {index.name} belongs to another file, delete this optional index"
            )
        return record

    def _read(self, path: Path) -> Iterator[dict[str, Any]]:
        if path.exists():
            with self.open(path) as file:
                yield from (record for _, record in records(file) if record is not None)


def json_safe(value: Any) -> Any:
    """Return ``value`` with NaN and infinities as strings, and with arrays and tensors of one element as numbers."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if hasattr(value, "item"):
        return json_safe(value.item())
    return value


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(json_safe(record), ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace") + b"\n"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ArenoError(
            f"cannot write {path}: {error.strerror or error}; check free disk space and permissions"
        ) from error


def _append(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    with _writing(path):
        _append_lines(path, [_line(record) for record in records])


def _append_lines(path: Path, lines: Iterable[bytes]) -> int:
    with open(path, "ab") as file:
        start = file.tell()
        file.write(b"".join(lines))
    return start


def _replace(path: Path, chunks: Iterable[bytes], mode: int | None = None) -> None:
    with _writing(path), replacing(path) as temporary, open(temporary, "wb") as file:
        if mode is not None:
            os.fchmod(file.fileno(), mode)  # before any content is written
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())


def _keep_until(path: Path, step: int) -> int:
    if not path.exists():
        return 0
    dropped = 0

    def until_step(lines: Iterable[bytes]) -> Iterator[bytes]:
        nonlocal dropped
        for line in lines:
            record = parse_record(line)
            if record is not None and record["step"] <= step:
                yield line
            else:
                dropped += 1

    with open(path, "rb") as file:
        _replace(path, until_step(file))
    return dropped
