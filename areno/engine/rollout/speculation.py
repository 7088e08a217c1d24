"""Speculative decoding by prompt lookup: guess that a text goes on as it did the last time, and check the guess in one call.

A sample that repeats itself or quotes its prompt has said its last few tokens before. What followed then is the draft; one
forward pass over it gives the distribution after each draft token. Every position is sampled with its own random number,
as it would be without a draft, and sampling goes on for as long as it agrees with the draft: so the answer is the same
tokens, not only the same distribution.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from areno.engine.model.attention import LayerAttention, scaled_dot_product
from areno.engine.rollout.drafts import DraftIndex
from areno.engine.rollout.kv_cache import READ_STEP, DecodePlan, SlotCache
from areno.engine.rollout.scheduler import round_up
from areno.engine.rollout.sequence import Sequence

# Tokens of one checking call over all rows: small calls read the weights once whatever their size, large ones pay for
# each token.
CALL_TOKENS = 64


def draft(sequences: Seq[Sequence], most: int, columns: int) -> list[list[int]]:
    """A draft of at most ``most`` tokens for each sequence, within the cache columns that are paid for; empty for none."""
    most = min(most, CALL_TOKENS // max(len(sequences), 1) - 1)
    drafts: list[list[int]] = []
    for sequence in sequences:
        left = sequence.group.sampling.max_new_tokens - len(sequence.output) - 1
        room = min(most, left, columns - sequence.length)
        # A grammar or a penalty changes with every token, so nothing can be sampled ahead of it.
        if room < 1 or sequence.edits is not None:
            drafts.append([])
            continue
        if sequence.drafts is None:
            sequence.drafts = DraftIndex()
        drafts.append(sequence.drafts.propose(sequence.context, room))
    return drafts


class Check(DecodePlan):
    """One checking call: what each of the first slots is fed, how that attends, and which results of it stand.

    Each row is fed the last token sampled and the draft behind it, padded to the width W of the longest.

    Args:
        cache: the KV cache; the sequences are in its first slots, and no layer keeps another state.
        sequences: what is running.
        drafts: one for each, empty for none.

    Attributes:
        tokens: ids to feed, padding included [rows * W].
        cells: which of those tokens somebody samples behind.
        members: whose each cell is.
        counters: index of the token that each cell samples.
    """

    def __init__(self, cache: SlotCache, sequences: Seq[Sequence], drafts: Seq[Seq[int]]) -> None:
        self._drafts = drafts
        fed = [[s.last_token, *own] for s, own in zip(sequences, drafts, strict=True)]
        width = max(map(len, fed))
        self._shape = len(fed), width
        self.tokens = [token for own in fed for token in own + [0] * (width - len(own))]
        places = [(row, place) for row, own in enumerate(fed) for place in range(len(own))]
        self.cells = [row * width + place for row, place in places]
        self.members = [sequences[row] for row, _ in places]
        self.counters = [len(sequences[row].output) + place for row, place in places]
        lengths = torch.tensor([len(own) for own in fed], device=cache.device)[:, None]
        offsets = torch.arange(width, device=cache.device)
        grid = torch.tensor([s.length - 1 for s in sequences], device=cache.device)[:, None] + offsets
        # Cells of padding write where nobody reads.
        write_at = torch.where(offsets < lengths, grid, cache.columns - 1).flatten()
        longest = max(s.length + len(own) for s, own in zip(sequences, drafts, strict=True))
        columns = torch.arange(round_up(longest, READ_STEP), device=cache.device)
        super().__init__(cache, torch.where(offsets < lengths, grid, 0).flatten(), write_at, columns)
        self._rows = self._rows // width

    def attend(self, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append k, v [rows * W, heads, size] to the cache and attend over it, each token up to itself."""
        self.write(layer, k, v)
        keys, values = self.cache.read(layer.layer, self._shape[0], len(self._columns))
        queries = q.unflatten(0, self._shape).transpose(1, 2)
        mask = self._mask(layer, q).unflatten(0, self._shape)[:, None]
        return scaled_dot_product(queries, keys, values, layer, mask).transpose(1, 2).flatten(0, 1)

    def standing(self, sampled: Seq[int]) -> list[list[int]]:
        """For each sequence the cells whose sampled tokens count: up to and with the first that differs from its draft."""
        result, start = [], 0
        for own in self._drafts:
            count = 1
            while count <= len(own) and sampled[start + count - 1] == own[count - 1]:
                count += 1
            result.append(list(range(start, start + count)))
            start += len(own) + 1
        return result
