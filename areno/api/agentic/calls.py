"""Calling a user's agent: in a thread with an event loop of its own, until it ends or its deadline comes.

What the agent does in its thread can stop neither the server nor the trainer. A coroutine that is late is cancelled, and
everything that it left running with it. A plain function cannot be: its thread is given up, and its keys with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

from areno.api.agentic.context import AgentContext
from areno.api.agentic.data import AgentBatch
from areno.api.agentic.samples import turns_in
from areno.api.agentic.trajectory import AgentTrajectoryTurn
from areno.errors import ArenoError
from areno.rewards.worker import describe_error, source_file

AgentFn = Callable[[Any, AgentBatch], Any]

GRACE_S = 5.0
"""How long a cancelled agent may take to clean up."""


class AgentCall:
    """One call of an agent, which begins at once.

    Args:
        function: the agent.
        context: its ``ctx``; its keys end with the call.
        batch: its tasks.
        timeout_s: its deadline.

    Attributes:
        turns: what it has returned so far; an agent that yields keeps what it yielded, whatever comes then.
        error: why it failed; empty where it did not.
        done: resolves when it has ended.
    """

    def __init__(self, function: AgentFn, context: AgentContext, batch: AgentBatch, timeout_s: float) -> None:
        self.batch, self.context = batch, context
        self.turns: list[AgentTrajectoryTurn] = []
        self.error = ""
        self.done: Future[None] = Future()
        self._function, self._timeout_s = function, timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="areno-agent", daemon=True)
        self._thread.start()

    @property
    def patience_s(self) -> float:
        """Seconds until nothing will be waited for any more."""
        return max(0.0, self._began + self._timeout_s + GRACE_S - time.monotonic())

    def end(self) -> None:
        """Take what there is; an agent that still runs is cancelled, or given up."""
        self.context.close()
        if not self.done.done():
            self.error = self.error or self._late()
            self._cancel()
        # A plain function that is late has been waited for already, and nothing can end it.
        self._thread.join(GRACE_S if self.done.done() or self._task is not None else 0.0)

    @property
    def abandoned(self) -> bool:
        """Whether its thread could not be ended."""
        return self._thread.is_alive()

    def _late(self) -> str:
        return f"no end within {self._timeout_s:g} s (--agent-timeout-s)"

    def _cancel(self) -> None:
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._task.cancel)

    def _run(self) -> None:
        try:
            returned = None if self._is_async else self._function(self.context, self.batch)
            asyncio.run(self._main(returned))
        except BaseException as error:  # whatever an agent raises, SystemExit included, is its own
            self.error = self.error or _reason(error, self._function)
        finally:
            with contextlib.suppress(Exception):
                self.done.set_result(None)

    @property
    def _is_async(self) -> bool:
        call = getattr(self._function, "__call__", None)  # noqa: B004  (an object may be an agent)
        return any(
            check(candidate)
            for candidate in (inspect.unwrap(self._function), call)
            for check in (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        )

    async def _main(self, returned: Any) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        deadline = asyncio.timeout(max(0.0, self._began + self._timeout_s - time.monotonic()))
        try:
            async with deadline:
                if self._is_async:
                    returned = self._function(self.context, self.batch)
                await self._take(returned)
        except TimeoutError as error:
            self.error = self._late() if deadline.expired() else _reason(error, self._function)

    async def _take(self, returned: Any) -> None:
        if isinstance(returned, AsyncIterator):
            async with contextlib.aclosing(returned) as parts:  # type: ignore[type-var]
                async for part in parts:
                    self.turns.extend(turns_in(part))
            return
        if inspect.isawaitable(returned):
            returned = await returned
        for part in returned if isinstance(returned, Iterator) else [returned]:
            self.turns.extend(turns_in(part))


def _reason(error: BaseException, function: AgentFn) -> str:
    """The error with the innermost line of the user's file; areno's own say enough by themselves."""
    if isinstance(error, ArenoError):
        return str(error)
    if isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return describe_error(error, source_file(function))
