"""Which replica works on which request, and what becomes of the requests of a replica that dies."""

import functools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from areno.errors import ArenoError, EngineError
from areno.rollouts.fleet.scheduler import Replica
from areno.types import GeneratedToken, Request, RolloutResult, RolloutSequence

# A request that was with so many replicas when they died is not given to another: it may be what kills them.
_MOST_TRIES = 3
_DRAIN_POLL_S = 0.1


class RolloutReplica(Replica, Protocol):
    """A replica as the router sees it."""

    def submit(self, requests: list[Request]) -> list[Future[RolloutResult]]:
        """See :class:`areno.engine.backend.Generator`."""

    def cancel(self, future: Future[RolloutResult]) -> None:
        """The same."""


@dataclass(slots=True, eq=False)
class _Routed:
    """A request and the replica that works on it; ``inner`` is that replica's future."""

    request: Request
    future: Future[RolloutResult]
    replica: RolloutReplica | None = None
    inner: Future[RolloutResult] | None = None
    tries: int = 0
    streamed: bool = False
    cancelled: bool = False


class RequestRouter:
    """Takes requests, and gives each to the replica that has the least to do.

    Attributes:
        resubmitted: requests that were begun again because their replica died; their partial output is discarded.
    """

    def __init__(self) -> None:
        self.resubmitted = 0
        self._lock = threading.Lock()
        self._replicas: dict[int, RolloutReplica] = {}
        self._open: dict[Future[RolloutResult], _Routed] = {}
        self._parked: list[_Routed] = []
        self._error: ArenoError | None = None

    def enter(self, number: int, replica: RolloutReplica) -> None:
        """A replica takes requests from now on."""
        with self._lock:
            self._replicas[number] = replica
            parked, self._parked = self._parked, []
        self._place(parked)

    def leave(self, number: int) -> None:
        """A replica takes none any more."""
        with self._lock:
            self._replicas.pop(number, None)

    def drain(self, replica: RolloutReplica) -> None:
        """Wait until a replica that has left works on nothing."""
        while True:
            with self._lock:
                if not any(routed.replica is replica for routed in self._open.values()):
                    return
            time.sleep(_DRAIN_POLL_S)

    def end(self, error: ArenoError) -> None:
        """Nobody takes requests any more: those that wait for a replica fail, and so does every later one."""
        with self._lock:
            self._error = self._error or error
            parked, self._parked = self._parked, []
        for routed in parked:
            self._finish(routed, error)

    def submit(self, requests: Sequence[Request]) -> list[Future[RolloutResult]]:
        """Take requests; one future each. Raises ArenoError: nobody takes requests any more."""
        opened = {}
        for request in requests:
            future: Future[RolloutResult] = Future()
            future.set_running_or_notify_cancel()
            opened[future] = _Routed(request, future)
        with self._lock:
            if self._error is not None:
                raise self._error
            self._open |= opened
        self._place(list(opened.values()))
        return list(opened)

    def cancel(self, future: Future[RolloutResult]) -> None:
        """Answer a request with what it has so far."""
        with self._lock:
            routed = self._open.get(future)
            if routed is None:
                return
            routed.cancelled = True
            waits = routed in self._parked
            if waits:
                self._parked.remove(routed)
        if waits:
            self._finish(routed, _nothing(routed.request))
        elif routed.inner is not None and routed.replica is not None:
            with suppress(EngineError):
                routed.replica.cancel(routed.inner)

    def unfinished(self, number: int) -> int:
        """Requests that a replica works on."""
        with self._lock:
            replica = self._replicas.get(number)
            return sum(routed.replica is replica for routed in self._open.values()) if replica is not None else 0

    def waiting(self) -> int:
        """Requests that no replica works on."""
        return len(self._parked)

    # -- placing ---------------------------------------------------------------------------------------------------

    def _place(self, requests: Sequence[_Routed]) -> None:
        batches: dict[RolloutReplica, list[_Routed]] = {}
        with self._lock:
            up = [replica for replica in self._replicas.values() if not replica.workers.failed]
            tokens = dict.fromkeys(up, 0)
            for other in self._open.values():
                if other.replica in tokens:
                    tokens[other.replica] += other.request.most_tokens
            ended = None if up else self._error
            for routed in requests:
                if up:
                    routed.replica = min(up, key=tokens.__getitem__)
                    tokens[routed.replica] += routed.request.most_tokens
                    batches.setdefault(routed.replica, []).append(routed)
                elif ended is None:
                    self._parked.append(routed)
        for routed in requests if ended is not None else ():
            self._finish(routed, ended)
        for replica, batch in batches.items():
            self._hand_over(replica, batch)

    def _hand_over(self, replica: RolloutReplica, batch: list[_Routed]) -> None:
        try:
            answers = replica.submit([self._watched(routed) for routed in batch])
        except EngineError as error:
            for routed in batch:
                self._failed(routed, replica, error)
            return
        for routed, inner in zip(batch, answers, strict=True):
            routed.inner = inner
            inner.add_done_callback(functools.partial(self._answered, routed, replica))
            if routed.cancelled:
                with suppress(EngineError):
                    replica.cancel(inner)

    def _watched(self, routed: _Routed) -> Request:
        """The request, with a listener that notes whether anything was streamed."""
        listener = routed.request.listener
        if listener is None:
            return routed.request

        def note(sample: int, token: GeneratedToken) -> None:
            routed.streamed = True
            listener(sample, token)

        return replace(routed.request, listener=note)

    # -- answers ---------------------------------------------------------------------------------------------------

    def _answered(self, routed: _Routed, replica: RolloutReplica, inner: Future[RolloutResult]) -> None:
        error = inner.exception()
        if error is None:
            self._finish(routed, inner.result())
        else:
            self._failed(routed, replica, error)

    def _failed(self, routed: _Routed, replica: RolloutReplica, error: BaseException) -> None:
        """An error of the request's own is its answer; what a dead replica has left undone is begun again."""
        routed.tries += 1
        if not replica.workers.failed:
            self._finish(routed, error)
        elif routed.cancelled:
            self._finish(routed, _nothing(routed.request))
        elif routed.streamed:
            self._finish(routed, EngineError(f"the replica died after it had begun to stream the answer: {error}"))
        elif routed.tries >= _MOST_TRIES:
            died = f"{routed.tries} replicas died while they had this request; last: {error}"
            self._finish(routed, EngineError(died))
        else:
            with self._lock:
                self.resubmitted += 1
                routed.replica = routed.inner = None
            self._place([routed])

    def _finish(self, routed: _Routed, outcome: RolloutResult | BaseException | None) -> None:
        with self._lock:
            self._open.pop(routed.future, None)
        if isinstance(outcome, RolloutResult):
            routed.future.set_result(outcome)
        else:
            routed.future.set_exception(outcome)


def _nothing(request: Request) -> RolloutResult:
    return RolloutResult([RolloutSequence([], [], finish_reason="abort") for _ in request.seeds])
