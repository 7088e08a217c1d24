"""Sends events about new data of runs. One task per run checks the run's files every 0.5 s, on behalf of all clients."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from areno.storage.run_lock import is_locked
from areno.viewer.catalog import OpenedRun, RunCatalog
from areno.viewer.tails import file_size, file_version

INTERVAL_S = 0.5
_COMMENT_EVERY_S = 15
"""After this number of seconds without an event, the event stream sends a comment line to keep the connection alive."""
_ROWS = ""
"""The key under which :class:`Changes` watches the list of runs. For a single run, the key is the run ID."""

Parts = dict[str, dict[str, Any]]
"""For each run ID and each kind of data, such as ``metrics`` or ``log``: a value that changes when this data changes."""


def sizes_of(run: OpenedRun) -> Parts:
    """Return the :data:`Parts` of a run, which are mainly file sizes; empty if the run was deleted."""
    files = run.files
    try:
        parts = {
            "metrics": file_size(files.metrics_path),
            "samples": file_size(files.samples_path),
            "evaluations": file_size(files.eval_samples_path),
            "warnings": file_size(files.warnings_path),
            "status": (file_version(files.status_path), is_locked(run.path)),
            "log": [file_size(path) for path in run.logs()],
            "timeline": [file_size(path) for path in (*run.traces("session_tracer"), *run.traces("perf_tracer"))],
        }
    except OSError:
        return {}
    return {run.id: parts}


class Changes:
    """Sends events about new data of runs to all clients, until ``stopping`` is set."""

    def __init__(self, catalog: RunCatalog, stopping: asyncio.Event) -> None:
        self._catalog, self._stopping = catalog, stopping
        self._watches: dict[str, _Watch] = {}

    async def events(self, runs: Sequence[OpenedRun]) -> AsyncIterator[str]:
        """Yield an event for each change of ``runs``, with the run ID as ``run`` and the changed kinds of data as ``changed``.

        If ``runs`` is empty, the events are about the list of all runs. The first event is empty, and indicates that the stream
        has begun.
        """
        client = _Client()
        watches = [self._watch(run.id, partial(sizes_of, run)) for run in runs] or [self._watch(_ROWS, self._rows)]
        for watch in watches:
            watch.clients.add(client)
        try:
            for watch in watches:
                await watch.begun.wait()
            yield "retry: 1000\ndata: {}\n\n"
            async for event in client.events():
                yield event
        finally:
            for watch in watches:
                watch.clients.discard(client)

    def _rows(self) -> Parts:
        return {run_id: {"row": row} for run_id, row in self._catalog.signature().items()}

    def _watch(self, key: str, look: Callable[[], Parts]) -> "_Watch":
        if key not in self._watches:
            self._watches[key] = _Watch(look, self._stopping, lambda: self._watches.pop(key))
        return self._watches[key]


class _Watch:
    """Checks a run or the list of runs for changes, as long as there are clients. Afterwards, ``ended`` is called."""

    def __init__(self, look: Callable[[], Parts], stopping: asyncio.Event, ended: Callable[[], object]) -> None:
        self.clients: set[_Client] = set()
        self.begun = asyncio.Event()
        self._task = asyncio.create_task(self._run(look, stopping, ended))

    async def _run(self, look: Callable[[], Parts], stopping: asyncio.Event, ended: Callable[[], object]) -> None:
        try:
            known = await asyncio.to_thread(look)
            self.begun.set()
            while self.clients and not stopping.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), INTERVAL_S)
                seen = await asyncio.to_thread(look)
                for run_id in {**known, **seen}:
                    old, new = known.get(run_id, {}), seen.get(run_id, {})
                    if changed := [part for part in {**old, **new} if old.get(part) != new.get(part)]:
                        for client in self.clients:
                            client.tell(run_id, changed)
                known = seen
        finally:
            ended()
            self.begun.set()
            for client in self.clients:
                client.end()


class _Client:
    """A client, with the changes of each run that have not been sent to the client yet."""

    def __init__(self) -> None:
        self._changed: dict[str, set[str]] = {}
        self._news = asyncio.Event()
        self._is_ended = False

    def tell(self, run_id: str, parts: Sequence[str]) -> None:
        self._changed.setdefault(run_id, set()).update(parts)
        self._news.set()

    def end(self) -> None:
        self._is_ended = True
        self._news.set()

    async def events(self) -> AsyncIterator[str]:
        while not self._is_ended:
            try:
                await asyncio.wait_for(self._news.wait(), _COMMENT_EVERY_S)
            except TimeoutError:
                yield ": no change\n\n"
                continue
            self._news.clear()
            changed, self._changed = self._changed, {}
            for run_id, parts in changed.items():
                yield f"data: {json.dumps({'run': run_id, 'changed': sorted(parts)})}\n\n"
