"""Rollout on the engine that trains: one process, or the ranks of one layout, generates and trains in turn.

No weights travel and none are held twice. A request that comes while the engine trains waits until it generates again.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

from areno.engine.backend import Backend
from areno.engine.engine import Engine
from areno.errors import EngineError
from areno.rollouts.fleet.delivery import UpdateReport
from areno.types import Request, RolloutResult


class SharedEngine:
    """The methods of a fleet, over the trainer's engine, which the trainer closes."""

    def __init__(self, engine: Backend) -> None:
        self.engine = engine
        self.version = 0
        self._lock = threading.RLock()
        self._generates = self._closed = False
        self._waiting: dict[Future[RolloutResult], Request] = {}
        self._running: dict[Future[RolloutResult], Future[RolloutResult]] = {}  # with the engine's future

    def __getattr__(self, name: str) -> Any:
        """What a fleet does as the engine does it: tokenizer, lengths, ``load``, ``keep_contexts`` and the like."""
        return getattr(self.engine, name)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """A block in which the engine generates; before its end, what was begun in it is finished."""
        self.engine.each_rank(_stamp, self.version)
        with self._lock:
            self._generates = True
            self._start()
        try:
            yield
        finally:
            with self._lock:
                self._generates = False
                begun = list(self._running)
            wait(begun)
            self.engine.end_rollout()

    def submit(self, requests: list[Request]) -> list[Future[RolloutResult]]:
        """Queue requests; one future each, which also has the error of a request that cannot be answered.

        Raises EngineError: the rollout is closed.
        """
        futures: list[Future[RolloutResult]] = [Future() for _ in requests]
        with self._lock:
            if self._closed:
                raise EngineError("the rollout is closed")
            self._waiting |= zip(futures, requests, strict=True)
            if self._generates:
                self._start()
        return futures

    def cancel(self, future: Future[RolloutResult]) -> None:
        """Answer one request with what it has so far; one that waits is withdrawn."""
        with self._lock:
            waits = self._waiting.pop(future, None) is not None
            inner = self._running.get(future)
        if waits:
            future.cancel()
        elif inner is not None:
            self.engine.cancel(inner)

    def _start(self) -> None:
        """Start what waits, but for requests that their senders have given up; the lock is held."""
        waiting, self._waiting = self._waiting, {}
        for future, request in waiting.items():
            if not future.set_running_or_notify_cancel():
                continue
            try:
                (inner,) = self.engine.submit([request])
            except EngineError as error:
                future.set_exception(error)
                continue
            self._running[future] = inner
            inner.add_done_callback(lambda done, future=future: self._answered(future, done))  # type: ignore[misc]

    def _answered(self, future: Future[RolloutResult], inner: Future[RolloutResult]) -> None:
        with self._lock:
            self._running.pop(future, None)
        if error := inner.exception():
            future.set_exception(error)
        else:
            future.set_result(inner.result())

    def update_weights(self, engine: Backend, version: int) -> UpdateReport:
        """The weights are there already; tokens carry ``version`` from now on."""
        self.version = version
        return UpdateReport(version, "shm", 0, 0.0)

    def close(self) -> None:
        """Fail what waits; the trainer closes the engine."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineError("the rollout is closed"))


def _stamp(engine: Engine, version: int) -> None:
    engine.loop.weights_changed(version)
