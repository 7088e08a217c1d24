"""The life of each rollout session: when it was submitted, generated, called tools, was rewarded, and how it ended.

    {logs}/session_tracer/{role}/sessions-r{rank}.jsonl     one session per line, written when it has ended

A task (a prompt) has one session per sample. Special here: the session is known to whatever runs inside its context, also
in tasks started there, so that an engine or a tool need not be handed it.
"""

import itertools
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from areno.observability.perf_tracer import append_lines

Status = Literal["pending", "accepted", "rejected", "failed", "dropped"]
PHASES = ("generate", "reward", "toolcall")
"""Phases whose seconds are told as ``{phase}_s``; others may be recorded beside them."""


@dataclass(slots=True)
class _Session:
    """One session; times are Unix seconds."""

    task_id: int
    session_id: int
    submit_ts: float
    status: Status = "pending"
    reason: str | None = None
    finalized_ts: float | None = None
    phases: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)

    def record(self, common: dict[str, Any]) -> dict[str, Any]:
        spent = {name: sum(span["end_ts"] - span["start_ts"] for span in spans) for name, spans in self.phases.items()}
        derived: dict[str, Any] = {f"{name}_s": spent.get(name, 0.0) for name in PHASES}
        derived["total_s"] = None if self.finalized_ts is None else self.finalized_ts - self.submit_ts
        return {**asdict(self), **common, **derived}


Held = tuple[Any, _Session] | None
"""A session with its tracer, to be handed to who works for it elsewhere; None outside of one."""

_current: ContextVar[Held] = ContextVar("rollout session", default=None)


def current_session() -> Held:
    """The session that this runs in."""
    return _current.get()


@contextmanager
def in_session(held: Held) -> Iterator[None]:
    """Work for a session that was opened elsewhere: phases and counters of the block are its own."""
    token = _current.set(held)
    try:
        yield
    finally:
        _current.reset(token)


class SessionTracer:
    """Gathers sessions; appends ended ones to a file once they are ``flush_threshold`` (0 and less mean 1)."""

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
        """Open a session of a task; phases and counters of the block, and of tasks started in it, are the session's.

        A session whose block raises has failed, whatever becomes of its task.
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
        """Record the block as a phase of the session that it runs in; outside of one, nothing."""
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

    @asynccontextmanager
    async def atrace_session_phase(self, phase: str) -> AsyncIterator[None]:
        """:meth:`trace_session_phase` for a block that waits."""
        with self.trace_session_phase(phase):
            yield

    def trace_session_event(self, name: str, count: int = 1) -> None:
        """Add to a counter of the session that this runs in; outside of one, nothing."""
        session = self._session()
        if session is not None:
            with self._lock:
                session.counters[name] = session.counters.get(name, 0) + count

    def finalize(self, task_id: int, status: Status, reason: str | None = None) -> None:
        """End the sessions of a task, failed ones aside; an unknown task is passed over. Write where that is enough.

        Raises ValueError: no such status; ArenoError: the file cannot be written.
        """
        if status not in get_args(Status):
            raise ValueError(f"status {status!r} is none of {', '.join(get_args(Status))}")
        with self._lock:
            sessions = self._open.pop(task_id, [])
            for session in sessions:
                if session.finalized_ts is None:
                    session.status, session.reason, session.finalized_ts = status, reason, self._now()
            self._ended += sessions
        self.flush()

    def flush(self, force: bool = False) -> None:
        """Write ended sessions where there are enough or ``force`` says so. Raises ArenoError: the file is not writable."""
        with self._lock:
            if not self._ended or not (force or len(self._ended) >= self._threshold):
                return
            ended, self._ended = self._ended, []
        records = [session.record(self._common) for session in ended]
        append_lines(self.path, records, "perf_tracer.session_tracer.enabled")

    def close(self) -> None:
        """Write everything, sessions that are still under way as ``pending``."""
        with self._lock:
            self._ended += [session for sessions in self._open.values() for session in sessions]
            self._open.clear()
        self.flush(force=True)

    def _session(self) -> _Session | None:
        held = _current.get()
        return held[1] if held is not None and held[0] is self else None

    def _now(self) -> float:
        return time.perf_counter() + self._offset
