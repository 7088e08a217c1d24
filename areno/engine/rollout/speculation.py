"""Speculative decoding by prompt lookup.

The draft of a sample consists of the tokens that followed the previous occurrence of the sample's last n-gram. One forward pass
gives the distributions at all positions of the draft. Each position is sampled with the same random number as without a draft.
Draft tokens are accepted until a draft token differs from the token sampled at its position. The differing draft token and all
later ones are rejected. Up to rounding, the output therefore has the same tokens as without a draft, not only the same
distribution.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from areno.engine.model.attention import LayerAttention, scaled_dot_product
from areno.engine.rollout.drafts import DraftIndex
from areno.engine.rollout.scheduler import round_up
from areno.engine.rollout.sequence import Sequence
from areno.engine.rollout.slot_cache import READ_STEP, DecodePlan, SlotCache

# Maximum tokens of one verification pass over all rows: small passes are bound by reading the weights, large ones by compute.
CALL_TOKENS = 64


def draft(sequences: Seq[Sequence], most: int, columns: int) -> list[list[int]]:
    """Return a draft of at most ``most`` tokens for each sequence. A draft may be empty.

    A sequence together with its draft has at most ``columns`` tokens, the number that fits into the reserved cache.
    """
    most = min(most, CALL_TOKENS // max(len(sequences), 1) - 1)
    drafts: list[list[int]] = []
    for sequence in sequences:
        left = sequence.group.sampling.max_new_tokens - len(sequence.output) - 1
        room = min(most, left, columns - sequence.length)
        # Grammars and penalties depend on every earlier token, so positions cannot be sampled in parallel.
        if room < 1 or sequence.edits is not None:
            drafts.append([])
            continue
        if sequence.drafts is None:
            sequence.drafts = DraftIndex()
        drafts.append(sequence.drafts.propose(sequence.context, room))
    return drafts


class VerifyPlan(DecodePlan):
    """A forward pass that verifies drafts. Row i of the pass uses slot i of the cache.

    The input of each row is the row's last sampled token and the row's draft. Each row is padded to W tokens, the length of
    the longest row.

    Args:
        cache: the KV cache. No layer may be recurrent.
        sequences: the running sequences. Sequence i must be in slot i.
        drafts: one draft per sequence. A draft may be empty.

    Attributes:
        tokens: input token ids [rows * W], including padding.
        cells: indices of those ``tokens`` that are not padding. One token is sampled after each of these input tokens.
        members: for each entry of ``cells``, the sequence to which this input token belongs.
        counters: for each entry of ``cells``, the index of the sampled token in the sequence's output.
    """

    def __init__(self, cache: SlotCache, sequences: Seq[Sequence], drafts: Seq[Seq[int]]) -> None:
        self._drafts = drafts
        fed = [[s.last_token, *tokens] for s, tokens in zip(sequences, drafts, strict=True)]
        width = max(map(len, fed))
        self._shape = len(fed), width
        self.tokens = [token for row in fed for token in row + [0] * (width - len(row))]
        places = [(row, place) for row, tokens in enumerate(fed) for place in range(len(tokens))]
        self.cells = [row * width + place for row, place in places]
        self.members = [sequences[row] for row, _ in places]
        self.counters = [len(sequences[row].output) + place for row, place in places]
        lengths = torch.tensor([len(row) for row in fed], device=cache.device)[:, None]
        offsets = torch.arange(width, device=cache.device)
        grid = torch.tensor([s.length - 1 for s in sequences], device=cache.device)[:, None] + offsets
        # Padding writes to the unused last column.
        write_at = torch.where(offsets < lengths, grid, cache.columns - 1).flatten()
        longest = max(s.length + len(tokens) for s, tokens in zip(sequences, drafts, strict=True))
        columns = torch.arange(round_up(longest, READ_STEP), device=cache.device)
        super().__init__(cache, torch.where(offsets < lengths, grid, 0).flatten(), write_at, columns)
        self._rows = self._rows // width

    def attend(self, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append keys ``k`` and values ``v`` [rows * W, heads, size] to the cache, and attend causally over the cache.

        W is the number of tokens per row, including padding.
        """
        self.write(layer, k, v)
        keys, values = self.cache.read(layer.layer, self._shape[0], len(self._columns))
        queries = q.unflatten(0, self._shape).transpose(1, 2)
        mask = self._mask(layer, q).unflatten(0, self._shape)[:, None]
        return scaled_dot_product(queries, keys, values, layer, mask).transpose(1, 2).flatten(0, 1)

    def accepted(self, sampled: Seq[int]) -> list[list[int]]:
        """Return, for each sequence, the indices in ``sampled`` of the tokens to keep.

        These tokens are the accepted draft tokens, and the token sampled after the last accepted draft token.
        """
        result, start = [], 0
        for draft_tokens in self._drafts:
            count = 1
            while count <= len(draft_tokens) and sampled[start + count - 1] == draft_tokens[count - 1]:
                count += 1
            result.append(list(range(start, start + count)))
            start += len(draft_tokens) + 1
        return result
