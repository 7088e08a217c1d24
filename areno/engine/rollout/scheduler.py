"""Admit sequences within the budget of the KV cache, preempt sequences if necessary, and keep the slots compact.

The B live sequences have the slots 0 to B-1 without gaps, so a decode step reads a view of the cache. The cache is a rectangle
with one row per live sequence. The number of columns is the length of the longest sequence, rounded up to a multiple of
:data:`COLUMN_STEP`. This module uses no tensors.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from areno.engine.rollout.sequence import Sequence

COLUMN_STEP = 64


def round_up(value: int, step: int) -> int:
    """Return the smallest multiple of ``step`` that is at least ``value``."""
    return -(-value // step) * step


@dataclass(frozen=True, slots=True)
class Move:
    """Moves a live sequence from cache slot ``source`` to cache slot ``target``.

    The sequence occupies the first ``length`` columns of its slot. A column holds one token.
    """

    source: int
    target: int
    length: int


@dataclass(slots=True)
class ChunkedPrefill:
    """Samples whose shared context is being prefilled in chunks. The first ``done`` tokens of the context are already cached.

    The slots of these samples directly follow the slots of the running samples.
    """

    members: list[Sequence]
    done: int = 0


@dataclass(slots=True)
class Scheduler:
    """The queue and the slots of a rollout loop.

    Args:
        budget_tokens: capacity of the cache in tokens. Each sequence with a slot occupies :meth:`columns` tokens of the cache,
            even if the sequence is shorter.
        max_running: maximum number of sequences that are decoded at once.
    """

    budget_tokens: int
    max_running: int
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    chunked_prefill: ChunkedPrefill | None = None
    preemptions: int = 0

    def live(self) -> list[Sequence]:
        """Return all sequences with a slot."""
        return self.running + (self.chunked_prefill.members if self.chunked_prefill else [])

    def held(self) -> int:
        """Return the number of slots in use."""
        return len(self.running) + (len(self.chunked_prefill.members) if self.chunked_prefill else 0)

    def prefilled(self, live: Iterable[Sequence]) -> list[Sequence]:
        """Return those of the ``live`` sequences whose whole context is cached."""
        return [sequence for sequence in live if sequence.slot < len(self.running)]

    def tokens_ahead(self) -> int:
        """Return the maximum number of tokens that all waiting and live sequences together have left to generate."""
        return sum(s.group.sampling.max_new_tokens - len(s.output) for s in (*self.waiting, *self.live()))

    def columns(self) -> int:
        """Return the number of cache columns (one per token) that the longest live sequence needs."""
        return round_up(max((s.length for s in self.live()), default=0), COLUMN_STEP)

    def cells(self) -> int:
        """Return the number of cache cells (rows times columns) that the live sequences occupy."""
        return self.held() * self.columns()

    def admit(self, tokens: int) -> list[list[Sequence]]:
        """Give slots to waiting sequences, as far as the cache size ``budget_tokens`` and the limit ``max_running`` allow.

        Args:
            tokens: maximum number of context tokens to prefill at once, in total. A shared context counts once. If the context
                of the first waiting sequence exceeds this number, the method returns an empty list, and starts a
                ``chunked_prefill``, which processes the context in several chunks. Until the chunked prefill is done, no other
                sequence is admitted.

        Returns:
            Lists of sequences with the same context. Each list needs one prefill. If a further context would raise the
            total above ``tokens``, its sequences wait for the next call.
        """
        shared: list[list[Sequence]] = []
        used = 0
        columns = self.columns()  # updated incrementally below, as a scan per admission would be quadratic
        while self.chunked_prefill is None and self.waiting and len(self.running) < self.max_running:
            head = self.waiting[0]
            columns = max(columns, round_up(head.length + 1, COLUMN_STEP))
            if self.running and (len(self.running) + 1) * columns > self.budget_tokens:
                break
            joins = bool(shared) and _same_context(shared[-1][0], head)
            if not joins and used + head.length > tokens:
                if not shared:
                    self._start_chunked_prefill()
                break
            self._take_slot(self.running)
            if joins:
                shared[-1].append(head)
            else:
                shared.append([head])
                used += head.length
        return shared

    def _start_chunked_prefill(self) -> None:
        first = self.waiting[0]
        self.chunked_prefill = ChunkedPrefill([])
        columns = max(self.columns(), round_up(first.length + 1, COLUMN_STEP))
        while self.waiting and (not self.chunked_prefill.members or _same_context(first, self.waiting[0])):
            held = self.held()
            if held and (held == self.max_running or (held + 1) * columns > self.budget_tokens):
                break
            self._take_slot(self.chunked_prefill.members)

    def _take_slot(self, members: list[Sequence]) -> None:
        sequence = self.waiting.popleft()
        sequence.slot = self.held()
        members.append(sequence)

    def finish_chunked_prefill(self) -> list[Sequence]:
        """End the chunked prefill, and add its sequences to the running sequences. Return the added sequences."""
        assert self.chunked_prefill is not None
        members, self.chunked_prefill = self.chunked_prefill.members, None
        self.running += members
        return members

    def make_room(self) -> list[Move]:
        """Preempt sequences, starting with the last slot, until the next decode step fits into the budget. Return the moves."""
        moves: list[Move] = []
        while self.held() > 1 and self.cells() > self.budget_tokens:
            victim = self.live()[-1]
            moves += self.remove([victim])
            self.waiting.appendleft(victim)
            self.preemptions += 1
        return moves

    def requeue(self) -> None:
        """Put all live sequences back at the front of the queue, in slot order.

        Call this method after the cache has become invalid.
        """
        live = self.live()
        self.running, self.chunked_prefill = [], None
        for sequence in reversed(live):
            sequence.slot = -1
            self.waiting.appendleft(sequence)

    def remove(self, finished: Iterable[Sequence]) -> list[Move]:
        """Free the slots of finished sequences, and fill the gaps with the last live sequences. Return the moves, in order."""
        moves = []
        before = len(self.running)
        for sequence in sorted(finished, key=lambda s: -s.slot):
            hole, sequence.slot = sequence.slot, -1
            if hole >= before:
                assert self.chunked_prefill is not None
                self.chunked_prefill.members.remove(sequence)
                continue
            last = self.running.pop()
            if last is not sequence:
                moves.append(Move(last.slot, hole, last.length))
                last.slot = hole
                self.running[hole] = last
        return moves + self._close_gap()

    def _close_gap(self) -> list[Move]:
        moves: list[Move] = []
        if self.chunked_prefill is not None:
            for target, member in enumerate(self.chunked_prefill.members, len(self.running)):
                if member.slot != target:
                    moves.append(Move(member.slot, target, self.chunked_prefill.done))
                    member.slot = target
            if not self.chunked_prefill.members:
                self.chunked_prefill = None
        return moves


def _same_context(first: Sequence, other: Sequence) -> bool:
    return first.group is other.group and not first.output and not other.output
