"""From the engine's thread to the event loop: the tokens of one HTTP request, as they are sampled.

The engine calls a listener per token and must not wait for anybody. So a token is only put down here, with its time. For a
stream the event loop is woken once for all tokens that gather until it looks; an answer that is sent whole wakes it when its
samples have ended, and costs nothing meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from areno.serving.metrics import ServingMetrics
from areno.types import GeneratedToken, Request, RolloutResult

if TYPE_CHECKING:
    from areno.engine.backend import Backend

TokenEvent = tuple[int, GeneratedToken, float]
"""Index of the sample, over all prompts of the request, its next token, and when that came, by ``time.perf_counter``."""


def by_sample(events: Iterable[TokenEvent]) -> Iterable[tuple[int, list[GeneratedToken]]]:
    """The tokens of each sample, in their order."""
    found: dict[int, list[GeneratedToken]] = {}
    for sample, token, _ in events:
        found.setdefault(sample, []).append(token)
    return found.items()


class Generation:
    """The samples of one HTTP request while they are generated; must be made in the event loop.

    Args:
        metrics: get the times of its tokens.
        requests: one per prompt; sample i of prompt p has the index ``samples of the prompts before + i``.
        on_end: called in the event loop once, when nothing is running any more.
        streams: whether tokens are wanted as they come.

    Raises:
        EngineError: the engine takes no requests.
    """

    def __init__(
        self,
        engine: Backend,
        metrics: ServingMetrics,
        requests: Sequence[Request],
        on_end: Callable[[], object],
        streams: bool,
    ) -> None:
        self._engine, self._on_end, self._streams = engine, on_end, streams
        self._inbox = _Inbox(asyncio.get_running_loop())
        self._error: BaseException | None = None
        self._metrics, self._began = metrics, time.perf_counter()
        self._last: dict[int, float] = {}  # when each sample got its last token
        listened, first = [], 0
        for request in requests:
            listened.append(replace(request, listener=functools.partial(self._take, first)))
            first += request.n
        self._futures = engine.submit(listened)
        self._running = self._unread = len(self._futures)
        for future in self._futures:
            future.add_done_callback(self._ended)

    def cancel(self) -> None:
        """Free the slots of what still runs; samples that are complete stay as they are."""
        for future in self._futures:
            if not future.done():
                self._engine.cancel(future)

    async def tokens(self) -> AsyncIterator[list[TokenEvent]]:
        """What was sampled since the last look, never empty, until all samples have ended. Raises EngineError."""
        while self._unread:
            events = []
            for item in await self._inbox.take():
                if isinstance(item, Future):
                    self._unread -= 1
                    self._error = self._error or item.exception()
                else:
                    events.append(item)
            if events:
                self._time(events)
                yield events
        if self._error is not None:
            raise self._error

    def _time(self, events: Sequence[TokenEvent]) -> None:
        for sample, _, now in events:
            known = self._last.get(sample)
            metric = self._metrics.first_token if known is None else self._metrics.per_token
            metric.observe(now - (self._began if known is None else known))
            self._last[sample] = now

    def _take(self, first: int, index: int, token: GeneratedToken) -> None:
        self._inbox.put((first + index, token, time.perf_counter()), wakes=self._streams)

    def _ended(self, future: Future[RolloutResult]) -> None:
        self._inbox.put(future)
        self._inbox.call(self._count_down)

    def _count_down(self) -> None:
        # Apart from the reading: who reads slowly, or not at all, holds no place in the queue.
        self._running -= 1
        if not self._running:
            self._on_end()


class _Inbox:
    """Hands items from any thread to one reader in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[TokenEvent | Future[RolloutResult]] = deque()
        self._ready = asyncio.Event()
        self._woken = False

    def put(self, item: TokenEvent | Future[RolloutResult], wakes: bool = True) -> None:
        """Leave an item, for a reader who is woken or looks later; from any thread."""
        self._items.append(item)
        if wakes and not self._woken:
            self._woken = True
            self.call(self._ready.set)

    def call(self, work: Callable[[], None]) -> None:
        """Let the event loop do something; from any thread."""
        # Where it has ended, its readers have too; the engine must not suffer from that.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work)

    async def take(self) -> list[TokenEvent | Future[RolloutResult]]:
        await self._ready.wait()
        self._ready.clear()
        self._woken = False  # before reading: an item that comes now wakes the loop again
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items
