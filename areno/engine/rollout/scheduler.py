"""Who runs next: admission by a budget of KV tokens, preemption instead of failure, compact slots.

Live sequences occupy slots 0..B-1 without holes, so that the cache of a decode step is a view. The cache is a rectangle:
its cost is the number of live sequences times the longest one, rounded up. No tensor is touched here.
"""

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
class ChunkedPrefill:
    """Samples whose shared context is being prefilled piece by piece; they hold the slots behind the running ones.

    ``done`` tokens of the context are cached.
    """

    members: list[Sequence]
    done: int = 0


@dataclass(slots=True)
class Scheduler:
    """Queue and slots of one rollout loop.

    Args:
        budget_tokens: cells of the KV rectangle that may be in use.
        max_running: most sequences decoded at once.
    """

    budget_tokens: int
    max_running: int
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    chunked_prefill: ChunkedPrefill | None = None
    preemptions: int = 0

    def live(self) -> list[Sequence]:
        """All sequences that hold a slot."""
        return self.running + (self.chunked_prefill.members if self.chunked_prefill else [])

    def held(self) -> int:
        """Slots in use."""
        return len(self.running) + (len(self.chunked_prefill.members) if self.chunked_prefill else 0)

    def tokens_ahead(self) -> int:
        """Tokens that everything waiting or running may still ask for."""
        return sum(s.group.sampling.max_new_tokens - len(s.output) for s in (*self.waiting, *self.live()))

    def columns(self) -> int:
        """Columns that the live sequences need."""
        return round_up(max((s.length for s in self.live()), default=0), COLUMN_STEP)

    def cells(self) -> int:
        """Cells of the KV rectangle in use."""
        return self.held() * self.columns()

    def admit(self, tokens: int) -> list[list[Sequence]]:
        """Give slots to waiting sequences while the budget lasts.

        Args:
            tokens: context tokens to prefill at once. A longer context does not come back from here: it becomes
                ``entering``, to be prefilled in pieces, and nobody else is admitted before it is done.

        Returns:
            Lists of sequences with the same context: each list needs one prefill. Call again for the rest.
        """
        shared: list[list[Sequence]] = []
        used = 0
        columns = self.columns()  # kept up to date below: looking at all live sequences for each new one would add up
        while self.chunked_prefill is None and self.waiting and len(self.running) < self.max_running:
            head = self.waiting[0]
            columns = max(columns, round_up(head.length + 1, COLUMN_STEP))
            if self.running and (len(self.running) + 1) * columns > self.budget_tokens:
                break
            joins = bool(shared) and _same_context(shared[-1][0], head)
            if not joins and used + head.length > tokens:
                if not shared:
                    self._enter()
                break
            self._take_slot(self.running)
            if joins:
                shared[-1].append(head)
            else:
                shared.append([head])
                used += head.length
        return shared

    def _enter(self) -> None:
        """The head of the queue, and the samples that share its context as far as they fit, begin a prefill in pieces."""
        first = self.waiting[0]
        self.chunked_prefill = ChunkedPrefill([])
        columns = max(self.columns(), round_up(first.length + 1, COLUMN_STEP))
        while self.waiting and (not self.chunked_prefill.members or _same_context(first, self.waiting[0])):
            held = self.held()
            if held and (held == self.max_running or (held + 1) * columns > self.budget_tokens):
                break
            self._take_slot(self.chunked_prefill.members)

    def _take_slot(self, members: list[Sequence]) -> None:
        """The head of the queue joins the running or the entering samples."""
        sequence = self.waiting.popleft()
        sequence.slot = self.held()
        members.append(sequence)

    def finish_chunked_prefill(self) -> list[Sequence]:
        """The entering samples are prefilled: from now on they run."""
        assert self.chunked_prefill is not None
        members, self.chunked_prefill = self.chunked_prefill.members, None
        self.running += members
        return members

    def make_room(self) -> list[Move]:
        """Send the youngest sequences back to the queue until the next decode step fits the budget."""
        moves: list[Move] = []
        while self.held() > 1 and self.cells() > self.budget_tokens:
            victim = self.live()[-1]
            moves += self.remove([victim])
            self.waiting.appendleft(victim)
            self.preemptions += 1
        return moves

    def requeue(self) -> None:
        """Send everyone back to the queue, in order: what is cached is worth nothing any more."""
        live = self.live()
        self.running, self.chunked_prefill = [], None
        for sequence in reversed(live):
            sequence.slot = -1
            self.waiting.appendleft(sequence)

    def remove(self, finished: Iterable[Sequence]) -> list[Move]:
        """Free slots and close the holes with the last live sequences; returns the copies that this needs, in order."""
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
        return moves + self._follow()

    def _follow(self) -> list[Move]:
        """Move entering samples up to the end of the running ones."""
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
