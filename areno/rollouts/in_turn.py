"""Rollout on the engine that trains: one process, or the ranks of one layout, generates and trains in turn.

No weights travel and none are held twice. A request that comes while the engine trains waits until it generates again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

from areno.engine.backend import Backend
from areno.engine.engine import Engine
from areno.engine.rollout.load import EngineLoad
from areno.errors import EngineError
from areno.rollouts.fleet.delivery import UpdateReport
from areno.types import Request, RolloutResult


class SharedEngine:
    """The methods of a fleet, over the trainer's engine; see the module's text.

    Args:
        engine: of the trainer, which closes it.
    """

    def __init__(self, engine: Backend) -> None:
        self.engine = engine
        self.version = 0
        self._lock = threading.RLock()
        self._generates = self._closed = False
        self._waiting: list[tuple[Request, Future[RolloutResult]]] = []
        self._running: set[Future[RolloutResult]] = set()
        self._started: dict[Future[RolloutResult], Future[RolloutResult]] = {}

    def __getattr__(self, name: str) -> Any:
        """Tokenizer, lengths and the like are those of the engine."""
        return getattr(self.engine, name)

    # -- turns -----------------------------------------------------------------------------------------------------

    @contextmanager
    def generating(self) -> Iterator[None]:
        """A block in which the engine generates; before its end, what was begun in it is finished."""
        self.engine.each_rank(_stamp, self.version)
        with self._lock:
            self._generates = True
            waiting, self._waiting = self._waiting, []
            for request, future in waiting:
                self._start_late(request, future)
        try:
            yield
        finally:
            with self._lock:
                self._generates = False
                begun = list(self._running)
            wait(begun)
            self.engine.end_rollout()

    def submit(self, requests: list[Request]) -> list[Future[RolloutResult]]:
        """Queue requests; one future each.

        Raises:
            EngineError: the fleet is closed, or a request cannot be answered.
        """
        with self._lock:
            if self._closed:
                raise EngineError("the rollout is closed")
            if self._generates:
                return self._start(requests)
            futures: list[Future[RolloutResult]] = [Future() for _ in requests]
            self._waiting += zip(requests, futures, strict=True)
            return futures

    def cancel(self, future: Future[RolloutResult]) -> None:
        """Answer one request with what it has so far; one that waits is withdrawn."""
        with self._lock:
            waits = [entry for entry in self._waiting if entry[1] is future]
            self._waiting = [entry for entry in self._waiting if entry[1] is not future]
            started = self._started.get(future, future)
        if waits:
            future.cancel()
        else:
            self.engine.cancel(started)

    def _start(self, requests: list[Request]) -> list[Future[RolloutResult]]:
        futures = self.engine.submit(requests)
        self._running.update(futures)
        for future in futures:
            future.add_done_callback(self._finished)
        return futures

    def _finished(self, future: Future[RolloutResult]) -> None:
        with self._lock:
            self._running.discard(future)

    def _start_late(self, request: Request, future: Future[RolloutResult]) -> None:
        """Start a request that waited, unless its sender has given it up; its result goes to the sender's future."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            (started,) = self._start([request])
        except EngineError as error:
            future.set_exception(error)
            return
        self._started[future] = started
        started.add_done_callback(lambda done: self._pass_on(done, future))

    def _pass_on(self, done: Future[RolloutResult], future: Future[RolloutResult]) -> None:
        with self._lock:
            self._started.pop(future, None)
        if error := done.exception():
            future.set_exception(error)
        else:
            future.set_result(done.result())

    # -- what a fleet has ------------------------------------------------------------------------------------------

    def load(self) -> EngineLoad:
        """What generation is busy with, now."""
        return self.engine.load()

    def keep_contexts(self, wanted: bool) -> None:
        """See :meth:`Engine.keep_contexts`."""
        self.engine.keep_contexts(wanted)

    def update_weights(self, engine: Backend, version: int) -> UpdateReport:
        """The weights are there already; tokens carry ``version`` from now on."""
        self.version = version
        return UpdateReport(version, "shm", 0, 0.0)

    def close(self) -> None:
        """Fail what waits; the trainer closes the engine."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineError("the rollout is closed"))


def _stamp(engine: Engine, version: int) -> None:
    engine.loop.weights_changed(version)
