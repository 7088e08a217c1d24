"""Who runs next: admission by a budget of KV tokens, preemption instead of failure, compact slots.

Live sequences occupy slots 0..B-1 without holes, so that the cache of a decode step is a view. The cache is a rectangle:
its cost is the number of live sequences times the longest one, rounded up. No tensor is touched here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from areno.engine.rollout.sequence import Sequence

COLUMN_STEP = 64


def round_up(value: int, step: int) -> int:
    """Smallest multiple of ``step`` that is at least ``value``."""
    return -(-value // step) * step


@dataclass(frozen=True, slots=True)
class Move:
    """A live sequence changes slots: copy ``length`` columns of ``source`` to ``target``."""

    source: int
    target: int
    length: int


@dataclass(slots=True)
class Scheduler:
    """Queue and slots of one rollout loop.

    Args:
        budget_tokens: cells of the KV rectangle that may be in use.
        max_running: most sequences decoded at once.
        prefill_tokens: prompt tokens of one prefill call, unless a single context is longer.
    """

    budget_tokens: int
    max_running: int
    prefill_tokens: int = 8192
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    preemptions: int = 0

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue new sequences, first come first served."""
        self.waiting.extend(sequences)

    def columns(self) -> int:
        """Columns that the next decode step needs."""
        return round_up(max((s.length for s in self.running), default=0), COLUMN_STEP)

    def admit(self) -> list[list[Sequence]]:
        """Give slots to waiting sequences while the budget lasts.

        Returns:
            Lists of sequences with the same context: each list needs one prefill. Together they stay within
            ``prefill_tokens``; call again for the rest.
        """
        shared: list[list[Sequence]] = []
        tokens = 0
        longest = max((s.length for s in self.running), default=0)
        while self.waiting and len(self.running) < self.max_running:
            head = self.waiting[0]
            longest = max(longest, head.length)
            columns = round_up(longest + 1, COLUMN_STEP)
            if self.running and (len(self.running) + 1) * columns > self.budget_tokens:
                break
            joins = bool(shared) and _same_context(shared[-1][0], head)
            if not joins and shared and tokens + head.length > self.prefill_tokens:
                break
            self.waiting.popleft()
            head.slot = len(self.running)
            self.running.append(head)
            if joins:
                shared[-1].append(head)
            else:
                shared.append([head])
                tokens += head.length
        return shared

    def make_room(self) -> list[Move]:
        """Send the youngest sequences back to the queue until the next decode step fits the budget."""
        moves: list[Move] = []
        while len(self.running) > 1 and len(self.running) * self.columns() > self.budget_tokens:
            victim = self.running[-1]
            moves += self.remove([victim])
            self.waiting.appendleft(victim)
            self.preemptions += 1
        return moves

    def remove(self, finished: Iterable[Sequence]) -> list[Move]:
        """Free slots and close the holes with the last live sequences; returns the copies that this needs, in order."""
        moves = []
        for sequence in sorted(finished, key=lambda s: -s.slot):
            hole, sequence.slot = sequence.slot, -1
            last = self.running.pop()
            if last is not sequence:
                moves.append(Move(last.slot, hole, last.length))
                last.slot = hole
                self.running[hole] = last
        return moves


def _same_context(first: Sequence, other: Sequence) -> bool:
    return first.group is other.group and not first.output and not other.output
