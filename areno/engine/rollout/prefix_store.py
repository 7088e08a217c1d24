"""Prefix cache: keys and values of finished samples, for later requests with the same prefix.

All entries are from the current version of the weights, because a new version clears the store. A stored prefix
consists of blocks of ``BLOCK`` tokens, and is found by the hashes of these blocks. The hash of a block also depends on all
earlier blocks of the prefix. The tokens of a found prefix are compared with the tokens of the request, so a hash collision does
no harm.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count

from areno.engine.rollout.sequence import Sequence
from areno.engine.rollout.slot_cache import SlotCache, Snapshot

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest cached prefix of a context."""

    snapshot: Snapshot
    length: int


class PrefixStore:
    """Stores snapshots of the KV cache. If the store is full, the least recently used snapshots are dropped.

    Args:
        budget_tokens: capacity of the store in tokens; 0 disables the store.
    """

    def __init__(self, budget_tokens: int) -> None:
        self.budget_tokens = budget_tokens
        self.tokens = 0
        self._version: int | None = None
        self._entries: OrderedDict[int, tuple[tuple[int, ...], Snapshot]] = OrderedDict()
        self._index: dict[int, list[int]] = {}
        self._keys = count()

    def find(self, context: Seq[int], version: int) -> Hit | None:
        """Return the longest stored prefix of ``context`` that is shorter than ``context``; None if there is no such prefix."""
        if version != self._version or not self._entries:
            return None
        best, matched = None, 0
        for length, key in _blocks(context[: len(context) - 1]):
            if key not in self._index:
                break
            best, matched = self._index[key][-1], length
        if best is None:
            return None
        tokens, snapshot = self._entries[best]
        if tokens[:matched] != tuple(context[:matched]):
            return None  # hash collision
        self._entries.move_to_end(best)
        return Hit(snapshot, matched)

    def covers(self, context: Seq[int], version: int) -> bool:
        """Return whether all full blocks of a context are stored."""
        blocks = _blocks(context)
        return version == self._version and (not blocks or blocks[-1][1] in self._index)

    def add(self, context: Seq[int], snapshot: Snapshot, version: int) -> None:
        """Store the full blocks of a context, unless they exceed the capacity. ``snapshot`` must contain these blocks."""
        if version != self._version:
            self.clear()
            self._version = version
        blocks = _blocks(context)
        if not blocks or blocks[-1][0] > self.budget_tokens:
            return
        length = blocks[-1][0]
        key = next(self._keys)
        self._entries[key] = (tuple(context[:length]), snapshot)
        for _, block in blocks:
            self._index.setdefault(block, []).append(key)
        self.tokens += length
        self.resize(self.budget_tokens)

    def resize(self, budget_tokens: int) -> None:
        """Change the capacity, and drop the least recently used entries until the rest fits."""
        self.budget_tokens = budget_tokens
        while self.tokens > budget_tokens:
            self.drop_oldest()

    def drop_oldest(self) -> bool:
        """Drop the least recently used entry. Return False if the store is empty."""
        if not self._entries:
            return False
        key, (tokens, _) = self._entries.popitem(last=False)
        self.tokens -= len(tokens)
        for _, block in _blocks(tokens):
            keys = self._index[block]
            keys.remove(key)
            if not keys:
                del self._index[block]
        return True

    def clear(self) -> None:
        """Drop all entries."""
        self._entries.clear()
        self._index.clear()
        self.tokens = 0


def remember(prefixes: PrefixStore, cache: SlotCache, finished: list[Sequence], version: int) -> None:
    """Store each finished sample without its last token, because the model may not have processed this token."""
    if not prefixes.budget_tokens or cache.states.tensors():
        return  # a recurrent state belongs to one length only
    for sequence in finished:
        context = sequence.context[:-1]
        if not prefixes.covers(context, version):
            prefixes.add(context, cache.snapshot(sequence.slot, len(context)), version)


def _blocks(tokens: Seq[int]) -> list[tuple[int, int]]:
    """Return the end position and the chained hash of each full block of tokens."""
    blocks, chain = [], 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        chain = hash((chain, *tokens[end - BLOCK : end]))
        blocks.append((end, chain))
    return blocks
