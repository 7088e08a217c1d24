"""Holds the performance tracer and the session tracer of the process.

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
    """Replace the performance tracer and the session tracer of the process by new tracers.

    The new tracers write below the folder ``logs``. Before the replacement, the old tracers write their events to their files.

    Args:
        perf: ``enabled``, ``save_interval`` and ``profile_steps`` of the ``perf_tracer`` section; None disables the
            performance tracer.
        session: ``enabled`` and ``flush_threshold`` of ``perf_tracer.session_tracer``; None disables the session tracer.
    """
    global _perf, _sessions
    _perf.save(force=True)
    _sessions.flush(force=True)
    _perf = PerfTracer(logs, role, rank, **{"enabled": False, **(perf or {})})
    _sessions = SessionTracer(logs, role, rank, **{"enabled": False, **(session or {})})


def perf_tracer() -> PerfTracer:
    """Return the performance tracer of the process."""
    return _perf


def session_tracer() -> SessionTracer:
    """Return the session tracer of the process."""
    return _sessions


@contextmanager
def trace_scope(name: str, category: str = Category.MISC, args: Args = None) -> Iterator[None]:
    """Call :meth:`PerfTracer.trace_scope` of the process's tracer."""
    with _perf.trace_scope(name, category, args):
        yield


@asynccontextmanager
async def atrace_scope(name: str, category: str = Category.MISC, args: Args = None) -> AsyncIterator[None]:
    """Call :meth:`PerfTracer.atrace_scope` of the process's tracer."""
    async with _perf.atrace_scope(name, category, args):
        yield


def trace_perf(name: str | None = None, category: str = Category.MISC) -> Callable[[Function], Function]:
    """Return a decorator that records each call of a function. Each call uses the tracer that is configured at that moment."""

    def decorate(function: Function) -> Function:
        scope: Any = atrace_scope if inspect.iscoroutinefunction(function) else trace_scope
        decorated: Function = scope(name or function.__qualname__, category)(function)
        return decorated

    return decorate


def instant(name: str, category: str = Category.MISC, args: Args = None) -> None:
    """Call :meth:`PerfTracer.instant` of the process's tracer."""
    _perf.instant(name, category, args)


def session_context(task_id: int) -> AbstractContextManager[int]:
    """Call :meth:`SessionTracer.session_context` of the process's tracer."""
    return _sessions.session_context(task_id)


def trace_session(phase: str) -> Callable[[Function], Function]:
    """Return a decorator that records each call of a function as a phase of the current session."""

    def decorate(function: Function) -> Function:
        scope: Any = atrace_session_phase if inspect.iscoroutinefunction(function) else trace_session_phase
        decorated: Function = scope(phase)(function)
        return decorated

    return decorate


@contextmanager
def trace_session_phase(phase: str) -> Iterator[None]:
    """Call :meth:`SessionTracer.trace_session_phase` of the process's tracer."""
    with _sessions.trace_session_phase(phase):
        yield


@asynccontextmanager
async def atrace_session_phase(phase: str) -> AsyncIterator[None]:
    """Record an asynchronous block in the same way as :func:`trace_session_phase`."""
    with _sessions.trace_session_phase(phase):
        yield


def trace_session_event(name: str, count: int = 1) -> None:
    """Call :meth:`SessionTracer.trace_session_event` of the process's tracer."""
    _sessions.trace_session_event(name, count)


def save(step: int | None = None, force: bool = False) -> None:
    """Write the records of the performance tracer and of the session tracer.

    Without ``force``, each tracer may keep its records until a later call.
    """
    _perf.save(step, force)
    _sessions.flush(force)
