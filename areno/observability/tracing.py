"""The global tracers of the process.

Both tracers are disabled until ``configure`` replaces them.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from pathlib import Path

from areno.observability.perf_tracer import Args, Category, Function, PerfTracer, traced, wrapped
from areno.observability.session_tracer import SessionTracer

_perf = PerfTracer(".", enabled=False)
_sessions = SessionTracer(".", enabled=False)


def configure(logs: str | Path, role: str, rank: int = 0, *, perf: Args = None, session: Args = None) -> None:
    """Replace the process's tracers after flushing the previous tracers.

    Args:
        perf: ``enabled``, ``save_interval`` and ``profile_steps`` of the ``perf_tracer`` section; None disables the tracer.
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


def trace_scope(name: str, category: str = Category.MISC, args: Args = None) -> AbstractContextManager[None]:
    """:meth:`PerfTracer.trace_scope` of the process's tracer."""
    return _perf.trace_scope(name, category, args)


def atrace_scope(name: str, category: str = Category.MISC, args: Args = None) -> AbstractAsyncContextManager[None]:
    """:meth:`PerfTracer.atrace_scope` of the process's tracer."""
    return _perf.atrace_scope(name, category, args)


def trace_perf(name: str | None = None, category: str = Category.MISC) -> Callable[[Function], Function]:
    """Decorator that records each call with the process's tracer at the time of the call."""
    return partial(traced, name=name, category=category, tracer=perf_tracer)


def instant(name: str, category: str = Category.MISC, args: Args = None) -> None:
    """:meth:`PerfTracer.instant` of the process's tracer."""
    _perf.instant(name, category, args)


def session_context(task_id: int) -> AbstractContextManager[int]:
    """:meth:`SessionTracer.session_context` of the process's tracer."""
    return _sessions.session_context(task_id)


def trace_session(phase: str) -> Callable[[Function], Function]:
    """Decorator that records each call as a phase of the current session."""
    return partial(wrapped, scope=partial(trace_session_phase, phase), async_scope=partial(atrace_session_phase, phase))


def trace_session_phase(phase: str) -> AbstractContextManager[None]:
    """:meth:`SessionTracer.trace_session_phase` of the process's tracer."""
    return _sessions.trace_session_phase(phase)


def atrace_session_phase(phase: str) -> AbstractAsyncContextManager[None]:
    """:meth:`SessionTracer.atrace_session_phase` of the process's tracer."""
    return _sessions.atrace_session_phase(phase)


def trace_session_event(name: str, count: int = 1) -> None:
    """:meth:`SessionTracer.trace_session_event` of the process's tracer."""
    _sessions.trace_session_event(name, count)


def save(step: int | None = None, force: bool = False) -> None:
    """Write the events of both tracers if a write is due."""
    _perf.save(step, force)
    _sessions.flush(force)
