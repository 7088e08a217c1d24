"""Records rollout sessions from submission to outcome, with the durations of generation, tool calls and reward.

    {logs}/session_tracer/{role}/sessions-r{rank}.jsonl     one session per line, written after the session ends

A task (a prompt group) may have several sessions. A context variable holds the current session. Therefore, code
that runs in the session, and asyncio tasks that this code starts, can access the session without a parameter.
"""

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from areno.observability.perf_tracer import append_lines

Status = Literal["pending", "accepted", "rejected", "failed", "dropped"]
PHASES = ("generate", "reward", "toolcall")
"""Phases whose total durations in seconds are recorded as ``{phase}_s``. For other phases, only start and end are recorded."""


@dataclass(slots=True)
class _Session:
    """A rollout session of a task. Times are Unix seconds."""

    task_id: int
    session_id: int
    submit_ts: float
    status: Status = "pending"
    reason: str | None = None
    finalized_ts: float | None = None
    phases: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)

    def record(self, common: dict[str, Any]) -> dict[str, Any]:
        seconds = {
            name: sum(span["end_ts"] - span["start_ts"] for span in spans) for name, spans in self.phases.items()
        }
        derived: dict[str, Any] = {f"{name}_s": seconds.get(name, 0.0) for name in PHASES}
        derived["total_s"] = None if self.finalized_ts is None else self.finalized_ts - self.submit_ts
        return {**asdict(self), **common, **derived}


SessionHandle = tuple[Any, _Session] | None
"""A tracer and its current session, to continue the session in another context; None outside a session."""

_current: ContextVar[SessionHandle] = ContextVar("rollout session", default=None)


def current_session() -> SessionHandle:
    """Return the current session with its tracer; None outside a session."""
    return _current.get()


@contextmanager
def in_session(handle: SessionHandle) -> Iterator[None]:
    """Make ``handle`` the current session during the block."""
    token = _current.set(handle)
    try:
        yield
    finally:
        _current.reset(token)


class SessionTracer:
    """Collects sessions, and appends finished sessions to a file in batches.

    ``flush_threshold`` is the number of finished sessions that are written together; values below 1 mean 1.
    """

    def __init__(
        self,
        logs: str | Path,
        role: str = "rollout",
        rank: int = 0,
        *,
        enabled: bool = True,
        flush_threshold: int = 256,
    ) -> None:
        self.enabled = enabled
        self.path = Path(logs) / "session_tracer" / role / f"sessions-r{rank}.jsonl"
        self._common = {"rank": rank, "role": role}
        self._threshold = max(flush_threshold, 1)
        self._lock = threading.Lock()
        self._session_ids = itertools.count()
        self._open: dict[int, list[_Session]] = {}
        self._ended: list[_Session] = []
        self._offset = time.time() - time.perf_counter()

    @contextmanager
    def session_context(self, task_id: int) -> Iterator[int]:
        """Open a session of the task ``task_id`` for the ``with`` block and for the asyncio tasks that the block starts.

        If the block raises an exception, the session gets the status ``failed``.
        """
        session = _Session(task_id, next(self._session_ids), self._now())
        if not self.enabled:
            yield session.session_id
            return
        with self._lock:
            self._open.setdefault(task_id, []).append(session)
        try:
            with in_session((self, session)):
                yield session.session_id
        except BaseException as error:
            session.status, session.reason = "failed", f"{type(error).__name__}: {error}"
            session.finalized_ts = self._now()
            raise

    @contextmanager
    def trace_session_phase(self, phase: str) -> Iterator[None]:
        """Record the block as a phase of the current session. If there is no current session, only run the block."""
        session = self._session()
        if session is None:
            yield
            return
        start = self._now()
        try:
            yield
        finally:
            with self._lock:
                session.phases.setdefault(phase, []).append({"start_ts": start, "end_ts": self._now()})

    def trace_session_event(self, name: str, count: int = 1) -> None:
        """Add ``count`` to a counter of the current session. If there is no current session, do nothing."""
        session = self._session()
        if session is not None:
            with self._lock:
                session.counters[name] = session.counters.get(name, 0) + count

    def finalize(self, task_id: int, status: Status, reason: str | None = None) -> None:
        """Set the outcome of the sessions of a task, and call :meth:`flush`.

        If the block of :meth:`session_context` raised an exception, the session keeps the status ``failed``. Unknown tasks are
        ignored. Raises ValueError if the status is unknown, and ArenoError if the file cannot be written.
        """
        if status not in get_args(Status):
            raise ValueError(f"session status {status!r} is unknown; use one of {', '.join(get_args(Status))}")
        with self._lock:
            sessions = self._open.pop(task_id, [])
            for session in sessions:
                if session.finalized_ts is None:
                    session.status, session.reason, session.finalized_ts = status, reason, self._now()
            self._ended += sessions
        self.flush()

    def flush(self, force: bool = False) -> None:
        """Write the finished sessions if there are at least ``flush_threshold`` of them, or if ``force`` is true.

        Raises ArenoError if the file cannot be written.
        """
        with self._lock:
            if not self._ended or not (force or len(self._ended) >= self._threshold):
                return
            ended, self._ended = self._ended, []
        records = [session.record(self._common) for session in ended]
        append_lines(self.path, records, "perf_tracer.session_tracer.enabled")

    def close(self) -> None:
        """Write all sessions. Sessions without an outcome are written with the status ``pending``."""
        with self._lock:
            self._ended += [session for sessions in self._open.values() for session in sessions]
            self._open.clear()
        self.flush(force=True)

    def _session(self) -> _Session | None:
        handle = _current.get()
        return handle[1] if handle is not None and handle[0] is self else None

    def _now(self) -> float:
        return time.perf_counter() + self._offset
