"""The web application of ``areno view``: read-only JSON endpoints, and the files of the page, which are kept in memory."""

import asyncio
import hashlib
import json
from collections import deque
from collections.abc import Iterator
from importlib.resources import files as package_files
from importlib.resources.abc import Traversable
from itertools import zip_longest
from pathlib import PurePath
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from areno import __version__
from areno.errors import UsageError
from areno.observability.chart import printable
from areno.observability.samples import bounded
from areno.reports.compare import compare_runs
from areno.reports.explanation import Explanation, explain
from areno.reports.run_data import KEYS, RunData, describe
from areno.serving.errors import ApiError, install_error_handlers
from areno.storage.log_file import log_part
from areno.storage.run_dir import json_safe
from areno.storage.sample_index import left_out
from areno.viewer.access import AccessMiddleware
from areno.viewer.catalog import OpenedRun, RunCatalog, completed_steps
from areno.viewer.changes import Changes
from areno.viewer.curves import MAX_POINTS, curve
from areno.viewer.evaluations import evaluations
from areno.viewer.sample_pages import SampleQuery, read_one, sample_page
from areno.viewer.tails import file_size
from areno.viewer.timeline import timeline

_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_MAX_RUNS, _MAX_NAMES, _MAX_PAGE = 50, 100, 200
_MAX_WARNINGS, _MAX_CHARS = 200, 4000
"""Maximum number of health warnings in a response, and maximum number of characters of a warning or a log line."""

RunIds = Annotated[list[str], Query(alias="run", max_length=_MAX_RUNS)]
Names = Annotated[list[str], Query(alias="name", max_length=_MAX_NAMES)]
Cursors = Annotated[list[str], Query(max_length=_MAX_NAMES)]


class DataResponse(JSONResponse):
    """A JSON response in ASCII. Non-finite numbers become strings.

    The response escapes unpaired surrogates (incomplete characters), which a model's output may contain.
    """

    def render(self, content: Any) -> bytes:
        """Encode the content."""
        try:
            return json.dumps(content, allow_nan=False, default=str).encode()
        except (ValueError, TypeError):  # TypeError: a key in a configuration is a date
            return json.dumps(json_safe(content), allow_nan=False, default=str).encode()


def create_viewer(catalog: RunCatalog, key: str | None, stopping: asyncio.Event) -> FastAPI:
    """Create the web application. The event streams of the application end when ``stopping`` is set."""
    app = FastAPI(title="areno view", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    install_error_handlers(app)
    _add_file_errors(app)
    _add_runs(app, catalog)
    _add_samples(app, catalog)
    _add_events(app, catalog, stopping)
    _add_page(app)
    app.add_middleware(AccessMiddleware, key=key)
    return app


def _add_file_errors(app: FastAPI) -> None:
    @app.exception_handler(UsageError)
    async def _(_: Request, error: UsageError) -> JSONResponse:
        return ApiError(404, "this folder is no longer a run; reload the list of runs", code="run_not_found").response()

    @app.exception_handler(OSError)
    async def _(_: Request, error: OSError) -> JSONResponse:
        name = PurePath(str(error.filename or "a file")).name
        status = 404 if isinstance(error, FileNotFoundError) else 403 if isinstance(error, PermissionError) else 500
        message = f"{name} of this run cannot be read: {error.strerror or error}"
        return ApiError(status, message, code="file_unreadable").response()


def _add_runs(app: FastAPI, catalog: RunCatalog) -> None:
    @app.get("/api/runs")
    def runs() -> DataResponse:
        rows = catalog.rows()
        more = {"outside": catalog.outside, "has_more": catalog.has_more}
        return DataResponse({"folder": catalog.shown, "runs": rows, **more})

    @app.get("/api/runs/{run_id}")
    def run(run_id: str) -> DataResponse:
        """Return the overview of a run: configuration, status and latest metrics."""
        return DataResponse(_overview(catalog.open(run_id)))

    @app.get("/api/runs/{run_id}/metrics")
    def metrics(
        run_id: str,
        name: Names = [],  # noqa: B006
        after: Cursors = [],  # noqa: B006
        points: int = MAX_POINTS,
    ) -> DataResponse:
        """Return the points of each metric in ``name``.

        ``after`` has one entry per metric: the field ``next`` of the metric in an earlier response, or an empty string for all
        points. In the response, ``metrics`` is the number of all metrics of the run. If this number has grown, the run has new
        metrics.
        """
        data = catalog.open(run_id).data()
        limit = min(max(points, 4), MAX_POINTS)
        series = {
            one: curve(data, one, known, limit) for one, known in zip_longest(name, after[: len(name)], fillvalue="")
        }
        recorded = {one: points for one, points in series.items() if points is not None}
        state = {
            "last_step": data.metrics.last_step,
            "metrics": len(data.metrics.names),
            "left_out": data.metrics.left_out,
        }
        return DataResponse({**state, "series": recorded})

    @app.get("/api/diff")
    def diff(left: str, right: str) -> DataResponse:
        """Return the differences between two runs, in the format of ``areno diff --json`` but without full paths."""
        comparison = compare_runs(*(RunData(catalog.open(run).path, catalog.opened) for run in (left, right))).as_data()
        return DataResponse({**comparison, "runs": [{**run, "path": run["name"]} for run in comparison["runs"]]})

    @app.get("/api/explain")
    def explained(name: str) -> DataResponse:
        """Return the meaning of each metric that matches ``name``, its normal values, and what to do about other values."""
        return DataResponse([_explanation(one) for one in explain(name)])

    @app.get("/api/runs/{run_id}/timeline")
    def timeline_of(run_id: str, until: float | None = None) -> DataResponse:
        return DataResponse(timeline(catalog.open(run_id), until))

    @app.get("/api/runs/{run_id}/log")
    def log(run_id: str, file: int = 0, after: int | None = None, before: int | None = None) -> DataResponse:
        """Return the lines of a log after or before a byte position; without a position, return the last lines."""
        return DataResponse(_log_part(catalog.open(run_id), file, after, before))


def _add_samples(app: FastAPI, catalog: RunCatalog) -> None:
    @app.get("/api/runs/{run_id}/samples")
    def samples(
        run_id: str,
        step_from: int | None = None,
        step_to: int | None = None,
        reward_min: float | None = None,
        reward_max: float | None = None,
        flag: Annotated[list[str], Query()] = [],  # noqa: B006
        text: str = "",
        order: str = "newest",
        offset: Annotated[int, Query(ge=0)] = 0,
        until: Annotated[int | None, Query(ge=0)] = None,
        limit: Annotated[int, Query(ge=1, le=_MAX_PAGE)] = 50,
    ) -> DataResponse:
        bounds = {"step_from": step_from, "step_to": step_to, "reward_min": reward_min, "reward_max": reward_max}
        page: dict[str, Any] = {"text": text, "order": order, "offset": offset, "until": until, "limit": limit}
        query = SampleQuery(**bounds, **page, flags=tuple(flag))  # type: ignore[arg-type]
        return DataResponse(sample_page(catalog.open(run_id), query))

    @app.get("/api/runs/{run_id}/samples/{index}")
    def sample(run_id: str, index: int) -> DataResponse:
        return DataResponse(read_one(catalog.open(run_id), index))

    @app.get("/api/runs/{run_id}/evaluations")
    def evaluated(run_id: str, before: int | None = None, after: int | None = None) -> DataResponse:
        """Return the answers to the same held-out prompts in two evaluations."""
        return DataResponse(evaluations(catalog.open(run_id), before, after))


def _add_events(app: FastAPI, catalog: RunCatalog, stopping: asyncio.Event) -> None:
    changes = Changes(catalog, stopping)

    @app.get("/api/events")
    async def events(run: RunIds = []) -> StreamingResponse:  # noqa: B006
        """Send events about new data of the runs whose IDs are in ``run``; without IDs, about the list of all runs."""
        followed = [await asyncio.to_thread(catalog.open, run_id) for run_id in dict.fromkeys(run)]
        headers = {"x-accel-buffering": "no"}  # a proxy passes each event on at once
        return StreamingResponse(changes.events(followed), media_type="text/event-stream", headers=headers)


def _add_page(app: FastAPI) -> None:
    static = {f"/{path}": content for path, content in _files(package_files("areno.viewer") / "static")}
    static["/"] = static["/index.html"]
    tags = {path: f'"{hashlib.sha256(content).hexdigest()[:32]}"' for path, content in static.items()}

    @app.get("/{path:path}")
    async def page(path: str, request: Request) -> Response:
        name = f"/{path}"
        if name not in static:
            return JSONResponse({"error": {"message": "there is no such page"}}, 404)
        headers = {"cache-control": "no-cache", "etag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        kind = _KINDS.get(PurePath(path or "index.html").suffix, "text/plain")
        return Response(static[name], media_type=kind, headers=headers)


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry, f"{prefix}{entry.name}/")
        else:
            yield f"{prefix}{entry.name}", entry.read_bytes()


def _explanation(one: Explanation) -> dict[str, str]:
    advice = one.advice
    known = {"normal": advice.text, "remedy": advice.remedy} if advice else {}
    return {"name": one.name, "unit": one.unit, "meaning": one.meaning, "command": one.front_end, **known}


def _overview(run: OpenedRun) -> dict[str, Any]:
    data, entries = run.data(), run.entries()
    warnings = deque(run.files.read_warnings(), _MAX_WARNINGS)
    last = {name: series.last for name, series in list(data.metrics.series.items())}
    times = data.metrics.times
    return {
        "id": run.id,
        "name": data.name,
        "path": str(run.path.relative_to(run.folder)),
        **describe(data.config),
        "status": data.status,
        "summary": data.summary,
        "warnings": [{**one, "text": bounded(one.get("text"), _MAX_CHARS)} for one in warnings],
        "config": data.config,
        "environment": data.environment,
        "steps": completed_steps(data),
        "updated": times.last if times.values else None,
        "metrics": last,
        "keys": {key: name for key in KEYS if (name := data.metric_of(key)) is not None},
        "samples": len(entries),
        "left_out": {
            run.files.metrics_path.name: data.metrics.left_out,
            run.files.samples_path.name: left_out(entries, file_size(run.files.samples_path)),
        },
        "evaluations": file_size(run.files.eval_samples_path) > 0,
        "traced": bool(run.traces("session_tracer") or run.traces("perf_tracer")),
        "logs": [path.name for path in run.logs()],
    }


def _log_part(run: OpenedRun, number: int, after: int | None, before: int | None) -> dict[str, Any]:
    """Return ``lines`` of a log, and their byte positions ``start`` and ``end``.

    ``size`` is the size of the log in bytes. ``files`` contains the names of all logs.
    """
    logs = run.logs()
    names = [path.name for path in logs]
    if not 0 <= number < len(logs):
        return {"files": names, "start": 0, "end": 0, "size": 0, "lines": []}
    with run.open(logs[number]) as file:
        part = log_part(file, after, before)
    lines = [printable(bounded(line, _MAX_CHARS)) for line in part.lines]
    return {"files": names, "start": part.start, "end": part.end, "size": part.size, "lines": lines}
