"""The engine of one rank, inside its worker process."""

import dataclasses
import functools
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from areno.engine.device import use_device
from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.engine.parallel.balance import shares_of_rows
from areno.engine.parallel.layout import Layout
from areno.engine.parallel.lockstep import LockstepLoop
from areno.engine.parallel.rank_context import connect
from areno.engine.parallel.rendezvous import Rendezvous
from areno.engine.scoring import Scored, TokenRows
from areno.types import GeneratedToken, Request, RolloutResult
from areno.types.routing import RoutingRecord

Send = Callable[[Any], None]
_SETTLE_S = 1.0  # time for the group to notice the end of another rank


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token sampled for a request that has a ``listener``, which is a function to call with every new token."""

    request: int
    sample: int
    token: GeneratedToken


@dataclass(frozen=True, slots=True)
class RequestResult:
    """The result of a finished request, or its error."""

    request: int
    result: RolloutResult | None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class LoopFailure:
    """The error that ended a rank's rollout loop. The other ranks of the replica cannot continue without this rank."""

    error: str


class EngineServer:
    """The engine of one rank.

    :class:`areno.engine.parallel.group.EngineGroup` calls the methods of this class and of its ``engine``. Most calls go to
    all ranks with the same arguments. ``where`` is the ranks' rendezvous. ``send`` sends an event to the group: a
    :class:`TokenEvent`, :class:`RequestResult` or :class:`LoopFailure`.
    """

    def __init__(
        self, path: str, config: EngineConfig, layout: Layout, rank: int, where: Rendezvous, send: Send
    ) -> None:
        use_device(config.device)
        self.peers = connect(layout, rank, where, config.device)
        self.engine = Engine(path, dataclasses.replace(config, peers=self.peers))
        self._send = send
        self._open: dict[int, Future[RolloutResult]] = {}
        if self.engine.kv_tokens and isinstance(self.engine.loop, LockstepLoop):
            self.engine.loop.on_failure = self._failed

    def _failed(self, error: BaseException) -> None:
        failure = LoopFailure("".join(traceback.format_exception(error)).strip())
        # Late, because the error may be the consequence of the end of another rank, which the group reports itself.
        threading.Timer(_SETTLE_S, self._send, [failure]).start()

    def limits(self) -> tuple[int | None, int, int]:
        """Return the context length, the vocabulary size and the KV cache size in tokens of the loaded engine."""
        engine = self.engine
        return engine.context_length, engine.vocab_size, engine.kv_tokens

    # -- run at once, on the leaders of replicas ---------------------------------------------------------------------

    def submit(self, requests: dict[int, Request], streamed: set[int]) -> None:
        """Queue numbered requests.

        ``streamed`` contains the numbers of the requests whose tokens are sent as events: one :class:`TokenEvent` per token.
        """
        listening = [
            dataclasses.replace(request, listener=self._listener(number)) if number in streamed else request
            for number, request in requests.items()
        ]
        for number, future in zip(requests, self.engine.submit(listening), strict=True):
            self._open[number] = future
            future.add_done_callback(functools.partial(self._done, number))

    def _listener(self, number: int) -> Callable[[int, GeneratedToken], None]:
        return lambda sample, token: self._send(TokenEvent(number, sample, token))

    def _done(self, number: int, future: Future[RolloutResult]) -> None:
        error = future.exception()
        self._send(RequestResult(number, None if error else future.result(), error))
        self._open.pop(number, None)

    def cancel(self, number: int) -> None:
        """Abort a request."""
        if number in self._open:
            self.engine.cancel(self._open[number])

    # -- run one after the other -------------------------------------------------------------------------------------

    def end_rollout(self) -> None:
        """Abort all pending requests, and wait until they have ended. Then free the memory of the rollout.

        Only the first rank of a tensor-parallel group aborts the requests; the other ranks only wait. See
        :meth:`areno.engine.engine.Engine.end_rollout`.
        """
        if self.peers.decides:
            self.engine.end_rollout()
        else:
            self.engine.free_rollout()

    def score(
        self,
        what: Scored,
        role: str,
        rows: TokenRows,
        micro_bs: int,
        temperatures: Sequence[float],
        routed: Sequence[RoutingRecord | None] | None = None,
    ) -> list[tuple[int, Any]]:
        """Score this rank's rows. Return pairs (row index, result), or an empty list if another rank returns the results."""
        self.engine.role(role).check(rows)  # all rows, so that all ranks raise the same error
        mine = shares_of_rows([len(row) for row in rows], self.peers.layout.shards)[self.peers.reader]
        own = [temperatures[index] for index in mine]
        records = None if routed is None else [routed[index] for index in mine]
        scores = self.engine.score(what, role, [rows[index] for index in mine], micro_bs, own, records)
        return list(zip(mine, scores, strict=True)) if self.peers.decides and self.peers.predicts else []

    def apply(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``function`` with this rank's engine as the first argument."""
        return function(self.engine, *arguments)
