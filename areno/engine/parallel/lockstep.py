"""Rollout loops that run in lockstep on the ranks of a sharded replica.

Each iteration (turn) of a rollout loop depends only on the requests, the cancellations, and the limits (the size of the prefix
cache and the maximum number of running sequences). Before each turn, the first rank (the leader) broadcasts all new requests,
cancellations and limits. Therefore, all ranks schedule, compute and sample identically. Each message contains the sum of all
token ids sampled so far. A rank raises an error if its own sum differs.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from areno.engine.parallel.channels import Channel
from areno.engine.rollout.loop import RolloutLoop
from areno.engine.rollout.sampler import Draw
from areno.engine.rollout.sequence import LoopCommands, SampleGroup, Sequence
from areno.errors import EngineError
from areno.types import Request


@dataclass(frozen=True, slots=True)
class _Message:
    """The message that the leader broadcasts before each turn; see the module docstring.

    Attributes:
        arrived: new requests, as pairs (number, request).
        cancelled: numbers of the requests to abort.
    """

    arrived: list[tuple[int, Request]] = field(default_factory=list)
    cancel_all: bool = False
    cancelled: list[int] = field(default_factory=list)
    sampled: int = 0  # sum of all token ids sampled so far
    pause: bool = False  # all ranks pause before this turn until their weights have changed
    idle: bool = False  # the leader has waited until no request was pending
    last: bool = False  # the loop ends
    prefix_tokens: int | None = None  # new limits, as in `LoopCommands`
    max_running: int | None = None


class LockstepLoop(RolloutLoop):
    """A rollout loop that sums its sampled token ids, to detect ranks that diverge.

    If the loop fails, it calls ``on_failure``, so that the other ranks do not wait for this rank forever.
    """

    sampled = 0
    on_failure: Callable[[BaseException], None] | None = None  # called with the error that ends the loop

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        if self.on_failure is not None:
            self.on_failure(error)

    def _take(self, sequences: list[Sequence], draw: Draw) -> None:
        self.sampled += sum(draw.tokens.tolist())
        super()._take(sequences, draw)


class LeadingLoop(LockstepLoop):
    """The rollout loop of a replica's first rank.

    ``turns`` is the channel for the messages to the other ranks. For the other arguments see :class:`RolloutLoop`.
    """

    def __init__(self, *args: Any, turns: Channel, **options: Any) -> None:
        self._turns = turns
        self._requests: dict[SampleGroup, Request] = {}
        self._numbers: dict[SampleGroup, int] = {}
        self._count = 0
        super().__init__(*args, **options)

    def _group(self, request: Request) -> SampleGroup:
        group = super()._group(request)
        self._requests[group] = dataclasses.replace(request, listener=None)
        return group

    def _apply(self, commands: LoopCommands) -> None:
        if commands or self._busy:
            arrived = []
            for group in commands.arrived:
                self._numbers[group] = self._count
                arrived.append((self._count, self._requests.pop(group)))
                self._count += 1
            cancelled = [self._numbers[group] for group in commands.cancelled]
            message = _Message(
                arrived,
                commands.cancel_all,
                cancelled,
                self.sampled,
                commands.pause,
                prefix_tokens=commands.prefix_tokens,
                max_running=commands.max_running,
            )
            self._turns.broadcast_object(message)
        super()._apply(commands)

    def wait_idle(self) -> None:
        """See :meth:`RolloutLoop.wait_idle`. Every rank of the replica must call this method."""
        with self._wake:
            super().wait_idle()
            if self.failure is None:
                self._turns.broadcast_object(_Message(sampled=self.sampled, idle=True))

    @contextmanager
    def weights_changing(self, version: int) -> Iterator[None]:
        """See :meth:`RolloutLoop.weights_changing`. Every rank of the replica must call this method."""
        with self._wake:
            self._check_alive()
            self._start()  # the loop's thread broadcasts the pause
        with super().weights_changing(version):
            yield

    def _finish(self, sequence: Sequence) -> None:
        super()._finish(sequence)
        if sequence.group.unfinished == 0:
            self._numbers.pop(sequence.group, None)

    def close(self) -> None:
        """Stop the loops of all ranks of the replica."""
        super().close()
        self._turns.broadcast_object(_Message(sampled=self.sampled, last=True))


class FollowingLoop(LockstepLoop):
    """The rollout loop of a rank that follows the leader. The loop receives requests only from the leader."""

    def __init__(self, *args: Any, turns: Channel, **options: Any) -> None:
        self._turns = turns
        self._followed: dict[int, SampleGroup] = {}
        self._idle = 0  # times that the leader was idle, less the calls of `wait_idle`
        super().__init__(*args, **options)
        self._thread = threading.Thread(target=self._run, name="areno-rollout", daemon=True)
        self._thread.start()

    def _next_work(self) -> bool:
        with self._wake:
            self._busy = bool(self.scheduler.waiting or self.scheduler.held())
            if not self._busy:
                self._threads.reset()
                self._wake.notify_all()
        message: _Message = self._turns.broadcast_object(None)
        if message.last:
            return False
        if message.sampled != self.sampled:
            raise EngineError("the ranks of a replica have sampled different tokens; please report this bug in areno")
        if message.arrived and self.model.adapter is not None:
            with torch.inference_mode(False):  # as in the leader's submitting thread
                self.model.adapter.merge()
        with self._wake:
            self._idle += message.idle
            groups = {number: self._group(request) for number, request in message.arrived}
            self._followed |= groups
            cancelled = [self._followed[number] for number in message.cancelled]
            limits = message.prefix_tokens, message.max_running
            self._apply(LoopCommands([*groups.values()], message.cancel_all, cancelled, message.pause, *limits))
        self._followed = {number: group for number, group in self._followed.items() if group.unfinished}
        return True

    def wait_idle(self) -> None:
        """Wait until the leader reports that no request is pending. Only the leader knows all requests."""
        with self._wake:
            self._wake.wait_for(lambda: self.failure is not None or self._idle)
            self._idle -= 1

    def set_limits(self, *, prefix_tokens: int | None = None, max_running: int | None = None) -> None:
        """Do nothing: this rank gets its limits from the leader's messages."""

    def close(self) -> None:
        """Wait until this rollout loop has ended. Then free the KV cache.

        The loop ends when the leader, which is the first rank of this replica, closes its own loop.
        """
        if self._thread is not None:
            self._thread.join()
        self.decode.close()
        self.cache.release()
