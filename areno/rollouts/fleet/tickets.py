"""Who works on which request: routing, and what becomes of the requests of a replica that dies."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace

from areno.engine.parallel.group import EngineGroup
from areno.errors import ArenoError, EngineError
from areno.types import GeneratedToken, Request, RolloutResult, RolloutSequence

# A request that was with so many replicas when they died is not given to another: it may be what kills them.
_MOST_TRIES = 3


@dataclass(slots=True, eq=False)
class Ticket:
    """A request and who works on it."""

    request: Request
    future: Future[RolloutResult]
    number: int = -1
    replica: EngineGroup | None = None
    inner: Future[RolloutResult] | None = None
    tries: int = 0
    heard: bool = False
    cancelled: bool = False


class Desk:
    """Takes requests, and gives them to the replica that has the least to do.

    Attributes:
        resubmitted: requests that were begun again because their replica died; what they had said is lost.
    """

    def __init__(self) -> None:
        self.resubmitted = 0
        self._lock = threading.Lock()
        self._replicas: dict[int, EngineGroup] = {}
        self._weights: dict[int, int] = {}
        self._open: dict[Future[RolloutResult], Ticket] = {}
        self._parked: list[Ticket] = []
        self._error: ArenoError | None = None

    def enter(self, number: int, replica: EngineGroup) -> None:
        """A replica takes requests from now on."""
        with self._lock:
            self._replicas[number], self._weights[number] = replica, 0
            parked, self._parked = self._parked, []
        self._place(parked)

    def leave(self, number: int) -> None:
        """A replica takes none any more."""
        with self._lock:
            self._replicas.pop(number, None)

    def end(self, error: ArenoError) -> None:
        """Nobody takes requests any more: those that wait for a replica fail, and so does every later one."""
        with self._lock:
            self._error = self._error or error
            parked, self._parked = self._parked, []
        for ticket in parked:
            self._fail(ticket, error)

    def submit(self, requests: Sequence[Request]) -> list[Future[RolloutResult]]:
        """Take requests; one future each.

        Raises:
            ArenoError: nobody takes requests any more.
        """
        tickets = []
        for request in requests:
            future: Future[RolloutResult] = Future()
            future.set_running_or_notify_cancel()
            tickets.append(Ticket(request, future))
        with self._lock:
            if self._error is not None:
                raise self._error
            self._open.update((ticket.future, ticket) for ticket in tickets)
        self._place(tickets)
        return [ticket.future for ticket in tickets]

    def cancel(self, future: Future[RolloutResult]) -> None:
        """Answer a request with what it has so far."""
        with self._lock:
            ticket = self._open.get(future)
            if ticket is None:
                return
            ticket.cancelled = True
            waits = ticket in self._parked
            if waits:
                self._parked.remove(ticket)
        if waits:
            self._answer(ticket, _nothing(ticket.request))
        elif ticket.inner is not None and ticket.replica is not None:
            with suppress(EngineError):
                ticket.replica.cancel(ticket.inner)

    def unfinished(self, number: int) -> int:
        """Requests that a replica works on."""
        with self._lock:
            return sum(ticket.number == number for ticket in self._open.values())

    def waiting(self) -> int:
        """Requests that no replica works on."""
        with self._lock:
            return len(self._parked)

    # -- placing ---------------------------------------------------------------------------------------------------

    def _place(self, tickets: Sequence[Ticket]) -> None:
        batches: dict[int, list[Ticket]] = {}
        with self._lock:
            replicas = {n: replica for n, replica in self._replicas.items() if not replica.workers.failed}
            ended = self._error
            for ticket in tickets:
                ticket.number, ticket.replica, ticket.inner = -1, None, None
                if replicas:
                    ticket.number = min(replicas, key=lambda n: self._weights[n])
                    ticket.replica = replicas[ticket.number]
                    self._weights[ticket.number] += ticket.request.most_tokens
                    batches.setdefault(ticket.number, []).append(ticket)
                elif ended is None:
                    self._parked.append(ticket)
        for ticket in tickets if ended is not None and not replicas else ():
            self._fail(ticket, ended)
        for number, batch in batches.items():
            self._hand_over(replicas[number], batch)

    def _hand_over(self, replica: EngineGroup, batch: list[Ticket]) -> None:
        try:
            answers = replica.submit([self._watched(ticket) for ticket in batch])
        except EngineError as error:
            for ticket in batch:
                self._refused(ticket, replica, error)
            return
        for ticket, inner in zip(batch, answers, strict=True):
            ticket.inner = inner
            inner.add_done_callback(functools.partial(self._answered, ticket, replica))
            if ticket.cancelled:
                with suppress(EngineError):
                    replica.cancel(inner)

    def _watched(self, ticket: Ticket) -> Request:
        """The request, with a listener that notes that it was told something."""
        listener = ticket.request.listener
        if listener is None:
            return ticket.request

        def told(sample: int, token: GeneratedToken) -> None:
            ticket.heard = True
            listener(sample, token)

        return replace(ticket.request, listener=told)

    # -- answers ---------------------------------------------------------------------------------------------------

    def _answered(self, ticket: Ticket, replica: EngineGroup, inner: Future[RolloutResult]) -> None:
        error = inner.exception()
        if error is None:
            self._answer(ticket, inner.result())
        else:
            self._refused(ticket, replica, error)

    def _refused(self, ticket: Ticket, replica: EngineGroup, error: BaseException) -> None:
        """An error of the request's own is its answer; what a dead replica has left undone is begun again."""
        ticket.tries += 1
        if not replica.workers.failed:
            self._fail(ticket, error)
        elif ticket.cancelled:
            self._answer(ticket, _nothing(ticket.request))
        elif ticket.heard:
            self._fail(ticket, EngineError(f"the replica died after it had begun to stream the answer: {error}"))
        elif ticket.tries >= _MOST_TRIES:
            self._fail(ticket, EngineError(f"{ticket.tries} replicas died while they had this request; last: {error}"))
        else:
            with self._lock:
                self.resubmitted += 1
                self._release(ticket)
            self._place([ticket])

    def _answer(self, ticket: Ticket, result: RolloutResult) -> None:
        self._forget(ticket)
        ticket.future.set_result(result)

    def _fail(self, ticket: Ticket, error: BaseException | None) -> None:
        self._forget(ticket)
        ticket.future.set_exception(error)

    def _forget(self, ticket: Ticket) -> None:
        with self._lock:
            self._open.pop(ticket.future, None)
            self._release(ticket)

    def _release(self, ticket: Ticket) -> None:
        """What a ticket weighed on its replica; one that has come after a dead one starts at nothing."""
        if self._replicas.get(ticket.number) is ticket.replica and ticket.number in self._weights:
            self._weights[ticket.number] -= ticket.request.most_tokens


def _nothing(request: Request) -> RolloutResult:
    return RolloutResult([RolloutSequence([], [], finish_reason="abort") for _ in request.seeds])
