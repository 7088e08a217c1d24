"""The engine of one rank, inside its worker process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areno.engine.device import use_device
from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.engine.parallel.balance import shares_of_rows
from areno.engine.parallel.peers import Layout, connect
from areno.engine.train.microbatch import MicroBatching
from areno.loss_fns.pack import LossFn
from areno.types import GeneratedToken, Request, RolloutResult, TrainSequence

Send = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Said:
    """A token of a request that somebody listens to."""

    request: int
    sample: int
    token: GeneratedToken


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a request."""

    request: int
    result: RolloutResult | None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What the other side needs to know of a loaded engine."""

    context_length: int | None
    vocab_size: int
    kv_tokens: int


class EngineServer:
    """Its methods, and those of its ``engine``, are called by :class:`areno.engine.parallel.group.EngineGroup`, on all ranks
    with the same arguments.

    Args:
        path: checkpoint folder or hub id of the actor.
        config: of the engine, with this rank's device.
        layout: of all ranks.
        rank: this one.
        folder: where the ranks meet.
        send: takes :class:`Said` and :class:`Done`.
    """

    def __init__(self, path: str, config: EngineConfig, layout: Layout, rank: int, folder: Path, send: Send) -> None:
        use_device(config.device)
        self.peers = connect(layout, rank, folder, config.device)
        self.engine = Engine(path, dataclasses.replace(config, peers=self.peers))
        self._send = send
        self._open: dict[int, Future[RolloutResult]] = {}

    def facts(self) -> Facts:
        """Of the loaded engine."""
        engine = self.engine
        kv_tokens = engine.kv_tokens if engine.config.trains != "reward" else 0
        return Facts(engine.context_length, engine.vocab_size, kv_tokens)

    # -- at once, on the leaders of replicas -------------------------------------------------------------------------

    def submit(self, numbers: list[int], requests: list[Request], heard: list[bool]) -> None:
        """Queue requests; those that are ``heard`` send every token."""
        listening = [
            dataclasses.replace(request, listener=self._listener(number)) if wanted else request
            for number, request, wanted in zip(numbers, requests, heard, strict=True)
        ]
        for number, future in zip(numbers, self.engine.submit(listening), strict=True):
            self._open[number] = future
            future.add_done_callback(lambda done, number=number: self._done(number, done))  # type: ignore[misc]

    def _listener(self, number: int) -> Callable[[int, GeneratedToken], None]:
        return lambda sample, token: self._send(Said(number, sample, token))

    def _done(self, number: int, future: Future[RolloutResult]) -> None:
        error = future.exception()
        self._send(Done(number, None if error else future.result(), error))
        self._open.pop(number, None)

    def cancel(self, number: int) -> None:
        """Abort a request."""
        if number in self._open:
            self.engine.cancel(self._open[number])

    # -- one after the other -----------------------------------------------------------------------------------------

    def end_rollout(self) -> None:
        """Nothing is pending any more: drop the cache unless it is to be kept."""
        if self.peers.leads:
            self.engine.end_rollout()
            return
        self.engine.wait_idle()
        if not self.engine.config.keep_rollout_state:
            self.engine.loop.drop_cache()

    def train(
        self,
        rows: Sequence[TrainSequence],
        loss_fn: LossFn,
        mini_bs: int | MicroBatching,
        accumulation: int | None,
        role: str,
    ) -> dict[str, float] | None:
        """Train on this rank's share of the rows; the first rank returns the statistics of all."""
        stats = self.engine.train(rows, loss_fn, mini_bs, accumulation, role)
        return stats if self.peers.first else None

    def score(
        self, kind: str, role: str, rows: Sequence[Sequence[int]], micro_bs: int, temperatures: Sequence[float] | None
    ) -> list[tuple[int, Any]]:
        """Score this replica's share: row number and result."""
        self.engine.role(role).limits.check(rows)  # on all ranks alike, before each looks at its own rows
        mine = shares_of_rows([len(row) for row in rows], self.peers.layout.dp_size)[self.peers.replica]
        chosen = [rows[index] for index in mine]
        if kind == "logprobs":
            assert temperatures is not None
            found: list[Any] = self.engine.score_logprobs(role, chosen, [temperatures[i] for i in mine], micro_bs)
        elif kind == "values":
            found = self.engine.score_values(role, chosen, micro_bs)
        else:
            found = self.engine.score_rewards(role, chosen, micro_bs)
        return list(zip(mine, found, strict=True)) if self.peers.leads else []

    def apply(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function with this rank's engine."""
        return function(self.engine, *arguments)

    def traffic(self) -> dict[str, int]:
        """Bytes that this rank has passed on to other replicas, by operation."""
        return dict(getattr(self.peers.data, "traffic", {}))

    def echo(self, *values: Any) -> Any:
        """The last of some values: what messages cost, for those who measure it."""
        return values[-1]
