"""The global tracers of the process.

Both tracers are disabled until ``configure`` replaces them.
"""

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from areno.observability.perf_tracer import Args, Category, PerfTracer
from areno.observability.session_tracer import SessionTracer

Function = TypeVar("Function", bound=Callable[..., Any])

_perf = PerfTracer(".", enabled=False)
_sessions = SessionTracer(".", enabled=False)


def configure(logs: str | Path, role: str, rank: int = 0, *, perf: Args = None, session: Args = None) -> None:
    """Flush the tracers of the process, and replace them.

    Args:
        perf: ``enabled``, ``save_interval`` and ``profile_steps`` of the ``perf_tracer`` section; None disables the
            tracer.
        session: ``enabled`` and ``flush_threshold`` of ``perf_tracer.session_tracer``; None disables the tracer.
    """
    global _perf, _sessions
    _perf.save(force=True)
    _sessions.flush(force=True)
    _perf = PerfTracer(logs, role, rank, **{"enabled": False, **(perf or {})})
    _sessions = SessionTracer(logs, role, rank, **{"enabled": False, **(session or {})})


def perf_tracer() -> PerfTracer:
    """The process's perf tracer."""
    return _perf


def session_tracer() -> SessionTracer:
    """The process's session tracer."""
    return _sessions


@contextmanager
def trace_scope(name: str, category: str = Category.MISC, args: Args = None) -> Iterator[None]:
    """:meth:`PerfTracer.trace_scope` of the process's tracer."""
    with _perf.trace_scope(name, category, args):
        yield


@asynccontextmanager
async def atrace_scope(name: str, category: str = Category.MISC, args: Args = None) -> AsyncIterator[None]:
    """:meth:`PerfTracer.atrace_scope` of the process's tracer."""
    async with _perf.atrace_scope(name, category, args):
        yield


def trace_perf(name: str | None = None, category: str = Category.MISC) -> Callable[[Function], Function]:
    """Decorator that records each call with the process's tracer at the time of the call."""

    def decorate(function: Function) -> Function:
        scope: Any = atrace_scope if inspect.iscoroutinefunction(function) else trace_scope
        decorated: Function = scope(name or function.__qualname__, category)(function)
        return decorated

    return decorate


def instant(name: str, category: str = Category.MISC, args: Args = None) -> None:
    """:meth:`PerfTracer.instant` of the process's tracer."""
    _perf.instant(name, category, args)


def session_context(task_id: int) -> AbstractContextManager[int]:
    """:meth:`SessionTracer.session_context` of the process's tracer."""
    return _sessions.session_context(task_id)


def trace_session(phase: str) -> Callable[[Function], Function]:
    """Decorator that records each call as a phase of the current session."""

    def decorate(function: Function) -> Function:
        scope: Any = atrace_session_phase if inspect.iscoroutinefunction(function) else trace_session_phase
        decorated: Function = scope(phase)(function)
        return decorated

    return decorate


@contextmanager
def trace_session_phase(phase: str) -> Iterator[None]:
    """:meth:`SessionTracer.trace_session_phase` of the process's tracer."""
    with _sessions.trace_session_phase(phase):
        yield


@asynccontextmanager
async def atrace_session_phase(phase: str) -> AsyncIterator[None]:
    """:func:`trace_session_phase` for asynchronous blocks."""
    with _sessions.trace_session_phase(phase):
        yield


def trace_session_event(name: str, count: int = 1) -> None:
    """:meth:`SessionTracer.trace_session_event` of the process's tracer."""
    _sessions.trace_session_event(name, count)


def save(step: int | None = None, force: bool = False) -> None:
    """Write the events of each tracer if its write is due. With ``force``, write them in any case."""
    _perf.save(step, force)
    _sessions.flush(force)
