"""Finds the runs of a folder, lists the runs without reading all metrics, and opens runs on demand.

A client refers to a run by an ID, and never by a path. The ID is a hash of the run's path. A run is listed only if its path is
inside the folder after symbolic links are resolved. :mod:`areno.viewer.confined` opens the files of runs. If a run has damaged
files, the other runs are still listed.
"""

import hashlib
import os
import threading
import time
from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import Any

from areno.reports.run_data import KEYS, MAX_RUNS, RunData, describe, find_runs, read_config
from areno.serving.errors import ApiError
from areno.storage.json_lines import parse_record
from areno.storage.run_dir import RunDirectory
from areno.storage.run_lock import is_locked
from areno.storage.run_status import RUNNING, read_status
from areno.storage.sample_index import Entries, index_path
from areno.viewer.confined import opener
from areno.viewer.tails import file_version, lines_between

_OPEN_RUNS = 16
_SEARCH_EVERY_S = 2.0
_SEARCH_SHARE = 10
"""The pause between two searches is at least this multiple of the duration of a search."""
_TAIL = 65536


class OpenedRun:
    """A run that a client views. The data of the run's files is cached, and is read again when files change."""

    def __init__(self, run_id: str, path: Path, folder: Path) -> None:
        self.id, self.path, self.folder, self.open = run_id, path, folder, opener(folder)
        self.files = RunDirectory(path, opened=self.open)
        self._lock = threading.Lock()
        self._entries: tuple[Any, Entries] | None = None

    @cached_property
    def _data(self) -> RunData:
        return RunData(self.path, self.open)

    def data(self) -> RunData:
        """Return the data of the run, with the newest metrics."""
        with self._lock:
            data = self._data
            data.metrics.update()
            data.__dict__.pop("config", None)  # a resumed run may have another configuration
            return data

    def entries(self) -> Entries:
        """Return the index of the recorded samples."""
        path = self.files.samples_path
        with self._lock:
            key = (file_version(path), file_version(index_path(path)))
            if self._entries is None or self._entries[0] != key:
                self._entries = (key, self.files.read_entries())
            return self._entries[1]

    def logs(self) -> list[Path]:
        """Return the paths of the log files. The main log of the run comes first."""
        names = [entry.name for entry in os.scandir(self.path) if entry.name.endswith((".log", "log.txt"))]
        return [
            self.path / name for name in sorted(names, key=lambda name: (name not in ("log.txt", "main.log"), name))
        ]

    def traces(self, kind: str) -> list[Path]:
        """Return the paths of the trace files. ``kind`` is ``perf_tracer`` or ``session_tracer``."""
        return sorted(path for path in (self.path / kind).glob("*/*.jsonl") if path.is_file() and not path.is_symlink())


class RunCatalog:
    """The runs at or below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.shown = folder.resolve(), str(folder)
        self.opened = opener(self.folder)
        self.outside = 0
        """Number of runs that are links to a place outside the folder. These runs are not shown."""
        self.has_more = False
        """Whether there are more than ``MAX_RUNS`` runs. Further runs are not shown."""
        self._searching, self._opening = threading.Lock(), threading.Lock()
        self._paths: dict[str, Path] = {}
        self._next_search = 0.0
        self._open: OrderedDict[str, OpenedRun] = OrderedDict()
        self._rows: dict[str, tuple[Any, dict[str, Any]]] = {}

    def paths(self) -> dict[str, Path]:
        """Return the run directories by ID. While another thread searches for runs, return the results of the last search."""
        is_first = self._next_search == 0
        if time.monotonic() >= self._next_search and self._searching.acquire(blocking=is_first):
            try:
                if time.monotonic() >= self._next_search:
                    self._search()
            finally:
                self._searching.release()
        return self._paths

    def open(self, run_id: str) -> OpenedRun:
        """Return the run with the ID ``run_id``. Raises ApiError if there is no such run."""
        path = self._paths.get(run_id) or self.paths().get(run_id)
        if path is None or not path.is_dir():
            raise ApiError(404, "there is no such run; reload the list of runs", code="run_not_found")
        with self._opening:
            run = self._open.pop(run_id, None) or OpenedRun(run_id, path, self.folder)
            self._open[run_id] = run
            while len(self._open) > _OPEN_RUNS:
                self._open.popitem(last=False)
        return run

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per run, with values such as name, state, steps, last reward and number of warnings.

        If a run is unreadable, its values are empty, and ``problem`` states the reason.
        """
        rows = [self._row(run_id, path) for run_id, path in self.paths().items()]
        return [row for row in rows if row is not None]

    def signature(self) -> dict[str, Any]:
        """Map each run ID to a value that changes whenever the row of the run in :meth:`rows` changes."""
        return {run_id: (_signature(path), is_locked(path)) for run_id, path in self.paths().items()}

    def _search(self) -> None:
        start = time.monotonic()
        runs = [(path, path.resolve()) for path in find_runs(self.folder, MAX_RUNS + 1)]
        self.has_more = len(runs) > MAX_RUNS
        inside = [path for path, target in runs[:MAX_RUNS] if target.is_relative_to(self.folder)]
        self.outside = len(runs[:MAX_RUNS]) - len(inside)
        self._paths = {_id_of(path.relative_to(self.folder)): path for path in inside}
        for run_id in self._rows.keys() - self._paths.keys():
            self._rows.pop(run_id, None)
        end = time.monotonic()
        self._next_search = end + max(_SEARCH_EVERY_S, (end - start) * _SEARCH_SHARE)

    def _row(self, run_id: str, path: Path) -> dict[str, Any] | None:
        """Return the row of a run in the list of runs; None if the run was deleted after :meth:`paths` had found the run."""
        if not path.is_dir():
            return None
        row: dict[str, Any] = {"id": run_id, "name": path.resolve().name, "path": str(path.relative_to(self.folder))}
        try:
            files, signature = RunDirectory(path, opened=self.opened), _signature(path)
            known = self._rows.get(run_id)
            if known is None or known[0] != signature:
                known = self._rows[run_id] = (signature, _content(files))
            status = read_status(files)
            state = status.get("state") or (RUNNING if is_locked(path) else "unknown")
            times = {name: status.get(name) for name in ("started", "ended", "error", "signal")}
            return {**row, **known[1], **times, "state": str(state)}
        except FileNotFoundError:
            return None
        except ApiError as error:
            problem = error.message
        except OSError as error:
            problem = f"{Path(str(error.filename)).name} cannot be read: {error.strerror or error}"
        except Exception as error:  # damaged files raise errors of many types
            problem = f"a file of this run cannot be read: {type(error).__name__}"
        return {**row, **describe({}), **_last_values([]), "warnings": 0, "state": "unknown", "problem": problem}


def completed_steps(data: RunData) -> int:
    """Return the number of completed training steps.

    Evaluations are ignored, because they are recorded under the number of the next training step.
    """
    metrics = list(data.metrics.series.items())  # another thread may add metrics, or replace them all
    return max((series.steps[-1] for name, series in metrics if not _is_evaluated(name)), default=-1) + 1


def _is_evaluated(name: str) -> bool:
    return name.startswith("eval") or "/eval/" in name


def _content(files: RunDirectory) -> dict[str, Any]:
    """Return the values that the list of runs shows for a run, except for values that cannot be cached, such as the state.

    The returned values remain valid until the result of :func:`_signature` changes.
    """
    warnings = sum(1 for _ in files.read_warnings())
    return {"warnings": warnings, **describe(read_config(files)), **_last_values(_last_records(files))}


def _last_records(files: RunDirectory) -> list[dict[str, Any]]:
    if not files.metrics_path.exists():
        return []
    with files.open(files.metrics_path) as file:
        stop = file.seek(0, 2)
        lines = lines_between(file, max(stop - _TAIL, 0), stop)[1]
    return [record for record in map(parse_record, lines) if record is not None]


def _last_values(records: list[dict[str, Any]]) -> dict[str, Any]:
    trained = [
        record for record in records if not all(_is_evaluated(name) for name in record.keys() - {"step", "time"})
    ]
    steps = max((record["step"] for record in trained), default=-1) + 1
    values: dict[str, Any] = {"steps": steps, "time": records[-1].get("time") if records else None}
    for key in ("reward", "loss"):
        pairs = ((name, record[name]) for record in reversed(records) for name in KEYS[key] if name in record)
        values[key] = next(pairs, (None, None))[1]
    return values


def _signature(path: Path) -> tuple[Any, ...]:
    files = RunDirectory(path)
    parts = (files.config_path, files.metrics_path, files.warnings_path, files.status_path)
    return tuple(file_version(part) for part in parts)


def _id_of(path: Path) -> str:
    return hashlib.sha256(path.as_posix().encode(errors="surrogateescape")).hexdigest()[:16]
