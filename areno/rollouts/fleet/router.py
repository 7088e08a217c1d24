"""Routes requests to replicas. If a replica dies, its requests are resubmitted to other replicas where possible."""

import functools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from areno.errors import ArenoError, EngineError
from areno.rollouts.fleet.replica_supervisor import Replica
from areno.types import GeneratedToken, Request, RolloutResult, RolloutSequence

# If this many replicas died while they processed a request, the request fails, because it may have killed them.
_MAX_TRIES = 3
_DRAIN_POLL_S = 0.1


class RolloutReplica(Replica, Protocol):
    """The replica methods that the router needs."""

    def submit(self, requests: list[Request]) -> list[Future[RolloutResult]]:
        """See :class:`areno.engine.backend.Generator`."""

    def cancel(self, future: Future[RolloutResult]) -> None:
        """See :class:`areno.engine.backend.Generator`."""


@dataclass(slots=True, eq=False)
class _RoutedRequest:
    """A request and the replica that processes the request. ``inner`` is the future that the replica returned."""

    request: Request
    future: Future[RolloutResult]
    replica: RolloutReplica | None = None
    inner: Future[RolloutResult] | None = None
    tries: int = 0
    streamed: bool = False
    cancelled: bool = False


class RequestRouter:
    """Routes each request to the least loaded replica.

    Attributes:
        resubmitted: number of requests that were restarted because their replica died. Their partial output is discarded.
    """

    def __init__(self) -> None:
        self.resubmitted = 0
        self._lock = threading.Lock()
        self._replicas: dict[int, RolloutReplica] = {}
        self._open: dict[Future[RolloutResult], _RoutedRequest] = {}
        self._parked: list[_RoutedRequest] = []
        self._error: ArenoError | None = None

    def enter(self, number: int, replica: RolloutReplica) -> None:
        """Start routing requests to a replica."""
        with self._lock:
            self._replicas[number] = replica
            parked, self._parked = self._parked, []
        self._place(parked)

    def leave(self, number: int) -> None:
        """Stop routing requests to a replica."""
        with self._lock:
            self._replicas.pop(number, None)

    def drain(self, replica: RolloutReplica) -> None:
        """Wait until a removed replica has finished its requests."""
        while True:
            with self._lock:
                if not any(routed.replica is replica for routed in self._open.values()):
                    return
            time.sleep(_DRAIN_POLL_S)

    def end(self, error: ArenoError) -> None:
        """Reject new requests. Requests that are waiting for a replica fail with ``error``."""
        with self._lock:
            self._error = self._error or error
            parked, self._parked = self._parked, []
        for routed in parked:
            self._finish(routed, error)

    @property
    def ended(self) -> bool:
        """Whether :meth:`end` has been called."""
        return self._error is not None

    def submit(self, requests: Sequence[Request]) -> list[Future[RolloutResult]]:
        """Route requests, and return one future per request. After :meth:`end`, raises the error that ``end`` received."""
        opened = {}
        for request in requests:
            future: Future[RolloutResult] = Future()
            future.set_running_or_notify_cancel()
            opened[future] = _RoutedRequest(request, future)
        with self._lock:
            if self._error is not None:
                raise self._error
            self._open |= opened
        self._place(list(opened.values()))
        return list(opened)

    def cancel(self, future: Future[RolloutResult]) -> None:
        """Abort a request. The request's future returns the partial answer."""
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
        """Return the number of unfinished requests of a replica."""
        with self._lock:
            replica = self._replicas.get(number)
            return sum(routed.replica is replica for routed in self._open.values()) if replica is not None else 0

    def waiting(self) -> int:
        """Return the number of requests that wait for a replica."""
        return len(self._parked)

    # -- placing ---------------------------------------------------------------------------------------------------

    def _place(self, requests: Sequence[_RoutedRequest]) -> None:
        batches: dict[RolloutReplica, list[_RoutedRequest]] = {}
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

    def _hand_over(self, replica: RolloutReplica, batch: list[_RoutedRequest]) -> None:
        try:
            answers = replica.submit([self._watched(routed) for routed in batch])
        except Exception as error:  # whatever it is, these requests are answered
            for routed in batch:
                self._failed(routed, replica, error)
            return
        for routed, inner in zip(batch, answers, strict=True):
            routed.inner = inner
            inner.add_done_callback(functools.partial(self._answered, routed, replica))
            if routed.cancelled:
                with suppress(EngineError):
                    replica.cancel(inner)

    def _watched(self, routed: _RoutedRequest) -> Request:
        """Return the request with a listener that records whether tokens arrived.

        If the replica dies, the request is resubmitted to another replica. The listener then drops tokens of the dead replica
        that arrive late.
        """
        listener, tries = routed.request.listener, routed.tries
        if listener is None:
            return routed.request

        def record(sample: int, token: GeneratedToken) -> None:
            if routed.tries == tries:
                routed.streamed = True
                listener(sample, token)

        return replace(routed.request, listener=record)

    # -- answers ---------------------------------------------------------------------------------------------------

    def _answered(self, routed: _RoutedRequest, replica: RolloutReplica, inner: Future[RolloutResult]) -> None:
        error = inner.exception()
        if error is None:
            self._finish(routed, inner.result())
        else:
            self._failed(routed, replica, error)

    def _failed(self, routed: _RoutedRequest, replica: RolloutReplica, error: BaseException) -> None:
        """Handle the error of a request. If its replica died, the request is resubmitted to another replica where possible.
        Otherwise, the request ends."""
        routed.tries += 1
        if not replica.workers.failed:
            self._finish(routed, error)
        elif routed.cancelled:
            self._finish(routed, _nothing(routed.request))
        elif routed.streamed and routed.request.on_restart is None:
            self._finish(routed, EngineError(f"the replica died while streaming the answer: {error}"))
        elif routed.tries >= _MAX_TRIES:
            self._finish(
                routed,
                EngineError(
                    f"{routed.tries} replicas died while they processed this request; the last error was: {error}"
                ),
            )
        else:
            if routed.streamed and routed.request.on_restart is not None:
                routed.request.on_restart()
                routed.streamed = False
            with self._lock:
                self.resubmitted += 1
                routed.replica = routed.inner = None
            self._place([routed])

    def _finish(self, routed: _RoutedRequest, outcome: RolloutResult | BaseException | None) -> None:
        with self._lock:
            self._open.pop(routed.future, None)
        if isinstance(outcome, RolloutResult):
            routed.future.set_result(outcome)
        else:
            routed.future.set_exception(outcome)


def _nothing(request: Request) -> RolloutResult:
    return RolloutResult([RolloutSequence([], [], finish_reason="abort") for _ in request.seeds])
