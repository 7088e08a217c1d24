"""Server-sent events about new data of runs, by looking at the sizes of their files twice a second."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from areno.storage.run_lock import is_locked
from areno.viewer.catalog import OpenedRun, RunCatalog
from areno.viewer.tails import file_size, file_version

INTERVAL_S = 0.5
_COMMENT_EVERY = 30
"""Intervals without an event, after which a comment keeps the connection alive."""


def sizes_of(run: OpenedRun) -> dict[str, Any]:
    """What tells that a part of a run has changed, by part."""
    files = run.files
    return {
        "metrics": file_size(files.metrics_path),
        "samples": file_size(files.samples_path),
        "evaluations": file_size(files.eval_samples_path),
        "warnings": file_size(files.warnings_path),
        "status": (file_version(files.status_path), is_locked(run.path)),
        "log": [file_size(path) for path in run.logs()],
        "timeline": [file_size(path) for path in (*run.traces("session_tracer"), *run.traces("perf_tracer"))],
    }


def watched(catalog: RunCatalog, run_ids: list[str]) -> Callable[[], dict[str, dict[str, Any]]]:
    """Return a function that looks at some runs, or at the rows of all, and returns their parts by run id.

    Raises:
        ApiError: one of the runs does not exist.
    """
    if not run_ids:
        return lambda: {run_id: {"row": row} for run_id, row in catalog.signature().items()}
    runs = [catalog.open(run_id) for run_id in run_ids]
    return lambda: {run.id: sizes_of(run) for run in runs}


async def event_stream(look: Callable[[], dict[str, dict[str, Any]]], stopping: asyncio.Event) -> AsyncIterator[str]:
    """Events ``{"run", "changed": [parts]}`` until ``stopping`` is set; the first, without a run, tells that they begin."""
    known = await asyncio.to_thread(_safely, look, {})
    yield "retry: 1000\ndata: {}\n\n"
    quiet = 0
    while not stopping.is_set():
        try:
            await asyncio.wait_for(stopping.wait(), INTERVAL_S)
        except TimeoutError:
            quiet += 1
        seen = await asyncio.to_thread(_safely, look, known)
        for run_id in {**known, **seen}:
            old, new = known.get(run_id, {}), seen.get(run_id, {})
            changed = [part for part in {**old, **new} if old.get(part) != new.get(part)]
            if changed:
                quiet = 0
                yield f"data: {json.dumps({'run': run_id, 'changed': changed})}\n\n"
        known = seen
        if quiet >= _COMMENT_EVERY:
            quiet = 0
            yield ": no change\n\n"


def _safely(
    look: Callable[[], dict[str, dict[str, Any]]], before: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Look; a run directory that is deleted meanwhile counts as unchanged."""
    try:
        return look()
    except OSError:
        return before
