"""Passes the tokens of one HTTP request from the engine's thread to the event loop.

The engine calls a listener for each token. The listener must never block, so the listener only queues the token with its
arrival time. Streaming requests wake the event loop once per batch of queued tokens.

Non-streaming requests wake the loop only when all samples have ended. Until then, none of their tokens has been delivered, so
a prompt whose replica fails can restart on another replica. The tokens of the failed attempt are discarded.
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
"""Index of the sample, the sample's next token, and the arrival time of the token (``perf_counter``).

The samples of a request are numbered consecutively across all its prompts.
"""

_Item = TokenEvent | Future[RolloutResult] | range
"""An entry of the token queue of a request.

A :data:`TokenEvent` is a new token. A ``Future`` means that all samples of one prompt have ended. A ``range`` has the indices
of samples that restart because their replica failed. The earlier tokens of these samples are discarded.
"""


def by_sample(events: Iterable[TokenEvent]) -> Iterable[tuple[int, list[GeneratedToken]]]:
    """Group tokens by sample. The tokens of a sample stay in order."""
    tokens: dict[int, list[GeneratedToken]] = {}
    for sample, token, _ in events:
        tokens.setdefault(sample, []).append(token)
    return tokens.items()


class Generation:
    """The in-flight samples of one HTTP request. Must be created in the event loop.

    Args:
        metrics: metrics in which token latencies are recorded.
        requests: one request per prompt. Samples are numbered consecutively across all prompts.
        on_end: function that is called once in the event loop when the last sample has ended.
        streams: deliver tokens as they arrive. Otherwise, all tokens are delivered when the last sample has ended.

    Raises:
        EngineError: the engine does not accept requests.
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
        self._inbox = _TokenQueue(asyncio.get_running_loop())
        self._error: BaseException | None = None
        self._metrics, self._began = metrics, time.perf_counter()
        self._last: dict[int, float] = {}  # arrival time of each sample's last token
        with_listeners, first = [], 0
        for request in requests:
            listener = functools.partial(self._on_token, first)
            restart = None if streams else functools.partial(self._on_restart, range(first, first + request.n))
            with_listeners.append(replace(request, listener=listener, on_restart=restart))
            first += request.n
        self._futures = engine.submit(with_listeners)
        self._running = self._unread = len(self._futures)
        for future in self._futures:
            future.add_done_callback(self._on_done)

    def cancel(self) -> None:
        """Cancel the samples that are still running, and free their slots."""
        for future in self._futures:
            if not future.done():
                self._engine.cancel(future)

    async def tokens(self) -> AsyncIterator[list[TokenEvent]]:
        """Yield non-empty batches of new tokens until all samples have ended. Raises EngineError if generation failed."""
        while self._unread:
            events: list[TokenEvent] = []
            for item in await self._inbox.take():
                if isinstance(item, Future):
                    self._unread -= 1
                    if not item.cancelled():  # a cancelled sample ends without a token
                        self._error = self._error or item.exception()
                elif isinstance(item, range):
                    events = [event for event in events if event[0] not in item]
                else:
                    events.append(item)
            if events:
                self._observe_latency(events)
                yield events
        if self._error is not None:
            raise self._error

    def _observe_latency(self, events: Sequence[TokenEvent]) -> None:
        for sample, _, now in events:
            previous = self._last.get(sample)
            metric = self._metrics.first_token if previous is None else self._metrics.per_token
            metric.observe(now - (self._began if previous is None else previous))
            self._last[sample] = now

    def _on_token(self, first: int, index: int, token: GeneratedToken) -> None:
        self._inbox.put((first + index, token, time.perf_counter()), wakes=self._streams)

    def _on_restart(self, samples: range) -> None:
        self._inbox.put(samples, wakes=False)

    def _on_done(self, future: Future[RolloutResult]) -> None:
        self._inbox.put(future, wakes=self._streams)
        self._inbox.call(self._count_down)

    def _count_down(self) -> None:
        # A sample leaves the queue even if a slow client has not read its tokens yet.
        self._running -= 1
        if not self._running:
            self._inbox.wake()
            self._on_end()


class _TokenQueue:
    """A thread-safe queue with one reader in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[_Item] = deque()
        self._ready = asyncio.Event()
        self._woken = False

    def put(self, item: _Item, wakes: bool) -> None:
        self._items.append(item)
        if wakes:
            self.wake()

    def wake(self) -> None:
        if not self._woken:
            self._woken = True
            self.call(self._ready.set)

    def call(self, work: Callable[[], None]) -> None:
        # A closed loop has no readers left, and must not raise in the engine's thread.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work)

    async def take(self) -> list[_Item]:
        await self._ready.wait()
        self._ready.clear()
        self._woken = False  # before reading, so that a later item wakes the loop again
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items
