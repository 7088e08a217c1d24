"""Generates with the training engine, which alternates between generation and training.

Weights are neither transferred nor duplicated. A request that arrives during training waits until generation resumes.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

from areno.engine.backend import Backend
from areno.engine.engine import Engine
from areno.errors import EngineError
from areno.rollouts.fleet.weight_transfer import UpdateReport
from areno.types import Request, RolloutResult


class SharedEngine:
    """Generates rollouts with the trainer's engine, instead of a :class:`RolloutFleet` with separate rollout engines.

    A :class:`RolloutFleet` has methods of the same names, so that a trainer can use either class. :meth:`close` does not close
    the engine, because the trainer closes the engine.
    """

    def __init__(self, engine: Backend) -> None:
        self.engine = engine
        self.version = 0
        self._lock = threading.RLock()
        self._generates = self._closed = False
        self._waiting: dict[Future[RolloutResult], Request] = {}
        self._running: dict[Future[RolloutResult], Future[RolloutResult]] = {}  # our future -> the engine's future

    def __getattr__(self, name: str) -> Any:
        """Return the engine's attribute, such as ``tokenizer``, ``context_length``, ``load`` or ``enable_prefix_cache``."""
        return getattr(self.engine, name)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Let the engine generate inside this context. On exit, waits for the requests that have started; on an exception,
        aborts them.
        """
        self.engine.run_on_all_ranks(_stamp, self.version)
        with self._lock:
            self._generates = True
            self._start()
        try:
            yield
            with self._lock:
                self._generates = False
                begun = list(self._running)
            wait(begun)
        finally:
            with self._lock:
                self._generates = False
            self.engine.end_rollout()

    def submit(self, requests: list[Request]) -> list[Future[RolloutResult]]:
        """Queue requests, and return one future per request. If a request is invalid, its future raises the error.

        Raises:
            EngineError: this object is closed.
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
        """Abort the request of ``future``. If the request has started, ``future`` returns the partial answer. Otherwise,
        ``future`` is cancelled."""
        with self._lock:
            waits = self._waiting.pop(future, None) is not None
            inner = self._running.get(future)
        if waits:
            future.cancel()
        elif inner is not None:
            self.engine.cancel(inner)

    def _start(self) -> None:
        """Submit all waiting requests to the engine, except cancelled requests. The caller must hold the lock."""
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
        """Set the weight version of the tokens that are sampled from now on. The engine already has the new weights."""
        self.version = version
        return UpdateReport(version, "shm", 0, 0.0)

    def close(self) -> None:
        """Reject new requests, and let waiting requests fail with an EngineError."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineError("the rollout is closed"))


def _stamp(engine: Engine, version: int) -> None:
    engine.loop.weights_changed(version)
