"""The runs below a folder: searched again every few seconds, listed from the ends of their files, opened on demand.

A client names a run by an id, a hash of its path, and never a path. A run counts only if it is inside the folder once symbolic
links are resolved, and so must be its files. What is in the files may be damaged: such a run never hides the others.
"""

import hashlib
import os
import threading
import time
from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import Any

from areno.reports.run_data import KEYS, MAX_RUNS, RunData, find_runs, read_config
from areno.serving.errors import ApiError
from areno.storage.metric_columns import MetricColumns
from areno.storage.run_dir import RunDirectory
from areno.storage.run_layout import CONFIG
from areno.storage.run_lock import is_locked
from areno.storage.run_status import RUNNING, read_status
from areno.storage.sample_index import Entries, index_path, read_entries
from areno.viewer.tails import file_version, last_records

_OPEN_RUNS = 16
_SEARCH_EVERY_S = 2.0
_SEARCH_SHARE = 10
"""A search is repeated at the earliest after this many times its own duration."""
_TAIL = 65536
_READ_SUFFIXES = (".jsonl", ".json", ".yaml", ".index", ".log", ".txt", ".lock")
_READ_WHOLE = (CONFIG, "environment.json", "status.json", "summary.json")
_MOST_BYTES = 2**24
"""Size of a file of ``_READ_WHOLE`` above which a run is not read."""


class OpenedRun:
    """A run that is being looked at; what was read of its files is kept, and follows them."""

    def __init__(self, run_id: str, path: Path, folder: Path) -> None:
        self.id, self.path, self.folder = run_id, path, folder
        self.files = RunDirectory(path)
        self.resets = 0
        """How often the metrics were replaced, as by a resume that repeats steps."""
        self._lock = threading.Lock()
        self._entries: tuple[Any, Entries] | None = None
        self._metrics_file = _inode(self.files.metrics_path)

    @cached_property
    def _data(self) -> RunData:
        return RunData(self.path)

    def data(self) -> RunData:
        """The run with its newest metrics."""
        with self._lock:
            data = self._data
            inode, read = _inode(self.files.metrics_path), len(data.metrics.times.steps)
            if inode != self._metrics_file:
                data.metrics, self._metrics_file = MetricColumns(self.files.metrics_path), inode
                self.resets += 1
            elif data.metrics.update() and len(data.metrics.times.steps) < read:
                self.resets += 1
            data.__dict__.pop("config", None)  # a resumed run may have another one
            return data

    def entries(self) -> Entries:
        """The index of the recorded samples."""
        path = self.files.samples_path
        with self._lock:
            key = (file_version(path), file_version(index_path(path)))
            if self._entries is None or self._entries[0] != key:
                self._entries = (key, read_entries(path))
            return self._entries[1]

    def logs(self) -> list[Path]:
        """The log files, the run's own first."""
        names = [entry.name for entry in os.scandir(self.path) if entry.name.endswith((".log", "log.txt"))]
        return [
            self.path / name for name in sorted(names, key=lambda name: (name not in ("log.txt", "main.log"), name))
        ]

    def traces(self, kind: str) -> list[Path]:
        """The trace files of ``perf_tracer`` or ``session_tracer``."""
        files = sorted((self.path / kind).glob("*/*.jsonl"))
        return [path for path in files if path.is_file() and path.resolve().is_relative_to(self.folder)]


class RunCatalog:
    """The runs below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.shown = folder.resolve(), str(folder)
        self.outside = 0
        """Runs that are not shown, because they are links out of the folder."""
        self.has_more = False
        """Whether there are more than ``MAX_RUNS``, which are not shown."""
        self._searching, self._opening = threading.Lock(), threading.Lock()
        self._paths: dict[str, Path] = {}
        self._next_search = 0.0
        self._open: OrderedDict[str, OpenedRun] = OrderedDict()
        self._rows: dict[str, tuple[Any, dict[str, Any]]] = {}

    def paths(self) -> dict[str, Path]:
        """The run directories by id; those of the last search while another thread searches."""
        is_first = self._next_search == 0
        if time.monotonic() >= self._next_search and self._searching.acquire(blocking=is_first):
            try:
                if time.monotonic() >= self._next_search:
                    self._search()
            finally:
                self._searching.release()
        return self._paths

    def open(self, run_id: str) -> OpenedRun:
        """The run with an id. Raises ApiError: there is none, or its files lead out of the folder."""
        path = self._paths.get(run_id) or self.paths().get(run_id)
        if path is None or not path.is_dir():
            raise ApiError(404, "there is no such run; reload the list of runs", code="run_not_found")
        with self._opening:
            run = self._open.pop(run_id, None) or OpenedRun(run_id, path, self.folder)
            self._open[run_id] = run
            while len(self._open) > _OPEN_RUNS:
                self._open.popitem(last=False)
        _check_files(path, self.folder)
        return run

    def rows(self) -> list[dict[str, Any]]:
        """One row per run, without reading whole files: name, algorithm, state, steps, last reward, warnings.

        A run that cannot be read has a ``problem`` instead.
        """
        rows = [self._row(run_id, path) for run_id, path in self.paths().items()]
        return [row for row in rows if row is not None]

    def signature(self) -> dict[str, Any]:
        """What changes when a row does, by run id."""
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
        """The row of a run; None if it was deleted since the search."""
        row: dict[str, Any] = {"id": run_id, "name": path.resolve().name, "path": str(path.relative_to(self.folder))}
        try:
            _check_files(path, self.folder)
            files, signature = RunDirectory(path), _signature(path)
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
        except Exception as error:  # of whatever is damaged
            problem = f"cannot be read: {type(error).__name__}"
        return {**row, **describe({}), **_last_values([]), "warnings": 0, "state": "unknown", "problem": problem}


def describe(config: dict[str, Any]) -> dict[str, str | None]:
    """The kind of a run (``train`` or ``experiment``), its algorithm and its model, from its configuration."""
    if "experiment_name" not in config:
        return {"kind": "train", "algo": _text(config.get("algo")), "model": _text(config.get("ckpt"))}
    actor, rows = (value if isinstance(value := config.get(name), dict) else {} for name in ("actor", "train_dataset"))
    algorithm = actor.get("algorithm") or ("ppo" if config.get("critic") else rows.get("type"))
    return {"kind": "experiment", "algo": _text(algorithm), "model": _text(actor.get("path"))}


def completed_steps(data: RunData) -> int:
    """Steps that a run has trained for; evaluations are recorded under the number of completed steps, one higher."""
    metrics = data.metrics
    return max((metrics[name].steps[-1] for name in metrics.names if not _is_evaluated(name)), default=-1) + 1


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _is_evaluated(name: str) -> bool:
    return name.startswith("eval") or "/eval/" in name


def _content(files: RunDirectory) -> dict[str, Any]:
    """What a row says that is kept until one of the files in :func:`_signature` changes."""
    warnings = len(files.read_warnings())
    values = _last_values(last_records(files.metrics_path, _TAIL))
    return {"warnings": warnings, **describe(read_config(files.path)), **values}


def _last_values(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Completed steps, the last reward (else the last loss) and the time of the last record."""
    records = [record for record in records if isinstance(record.get("step"), int)]
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


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _check_files(run: Path, folder: Path) -> None:
    """Raise ApiError if a file of a run is a link out of the folder, no regular file, or too large to read as a whole."""
    for entry in os.scandir(run):
        if not entry.name.endswith(_READ_SUFFIXES):
            continue
        if not _is_inside(entry, folder):
            message = f"{entry.name} of this run is not a regular file inside the viewed folder"
            raise ApiError(403, message, code="outside_folder")
        if entry.name in _READ_WHOLE and entry.stat().st_size > _MOST_BYTES:
            raise ApiError(403, f"{entry.name} of this run has more than {_MOST_BYTES} bytes", code="file_too_large")


def _is_inside(entry: os.DirEntry[str], folder: Path) -> bool:
    return entry.is_file() and (not entry.is_symlink() or Path(entry.path).resolve().is_relative_to(folder))


def _id_of(path: Path) -> str:
    return hashlib.sha256(path.as_posix().encode(errors="surrogateescape")).hexdigest()[:16]
