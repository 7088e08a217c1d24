"""Computes log-probs and entropies from logits.

The backward pass needs one buffer as large as the logits; with autograd, the backward pass would need five such buffers.

If the vocabulary is sharded across ranks, each rank has a slice of every row's logits. For every row, each rank sends three
numbers to the other ranks: the log-sum-exp of the slice, the target's logit, and, for the entropy, the mean of the slice's
logits, weighted by their probabilities. The gradient of a slice needs no further communication.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from areno.engine.parallel.channels import Channel


@dataclass(frozen=True, slots=True)
class VocabularyShare:
    """This rank's slice of a sharded vocabulary. The slices of the last ranks may be shorter."""

    start: int  # first token of the slice
    width: int  # tokens in the slice
    longest: int  # tokens in the first rank's slice
    total: int  # tokens in all slices
    channel: Channel  # channel to the ranks with the other slices, in slice order

    def whole(self, logits: Tensor) -> Tensor:
        """Gather the logits [N, total] from the ranks' slices [N, width], without gradient. All ranks must call this method."""
        mine = pad(logits.detach(), (0, self.longest - self.width))
        slices = self.channel.all_gather_tensor(mine.reshape(-1)).view(self.channel.size, len(logits), self.longest)
        return slices.movedim(0, 1).reshape(len(logits), -1)[:, : self.total]


def token_logprobs(
    logits: Tensor, tokens: Tensor, temperatures: Tensor, entropy: bool, share: VocabularyShare | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-probs of tokens, and the entropies in nats. The entropies have no gradient.

    Args:
        logits: logits [N, V]; if the vocabulary is sharded, this rank's slice of the logits.
        tokens: token ids [N] in the whole vocabulary.
        temperatures: sampling temperatures [N].
        share: this rank's slice of the vocabulary; None if the vocabulary is not sharded.

    Returns:
        Log-probs [N] in fp32, and entropies [N]. Without ``entropy``, the tensor of entropies is empty.
    """
    width = logits.shape[-1]
    share = share or VocabularyShare(0, width, width, width, Channel())
    return _TokenLogprobs.apply(logits, tokens, temperatures, entropy, share)


def logit_bounds(logits: Tensor, share: VocabularyShare | None = None) -> Tensor:
    """Return the minimum and maximum logit [N, 2] of each row [N, V], without gradient.

    If the vocabulary is sharded, the result covers the slices of all ranks.
    """
    logits = logits.detach()
    least, greatest = logits.amin(-1).float(), logits.amax(-1).float()
    if share is not None:
        leasts, greatests = _of_all(torch.stack([least, greatest]), share.channel).unbind(1)
        least, greatest = leasts.amin(0), greatests.amax(0)
    return torch.stack([least, greatest], -1)


def scale_logits(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Divide logits [N, V] by the temperature of each row. The result is fp32."""
    return logits.float() / temperatures[:, None]


class _TokenLogprobs(torch.autograd.Function):
    """Computes the log-softmax at one index per row, from this rank's slice of each row.

    Every rank must call this function with its own slice, and all ranks get the same results.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperatures: Tensor, entropy: bool, share: VocabularyShare
    ) -> tuple[Tensor, Tensor]:
        scaled = scale_logits(logits, temperatures)
        own = scaled.logsumexp(-1)
        inside = (tokens >= share.start) & (tokens < share.start + share.width)
        column = torch.where(inside, tokens - share.start, 0)[:, None]
        picked = torch.where(inside, scaled.gather(-1, column)[:, 0], 0.0)
        saved, mean = scaled, torch.zeros_like(own)
        if entropy:
            saved = (scaled - own[:, None]).exp_()
            mean = (saved * scaled).nan_to_num_(nan=0.0).sum(-1)  # tokens masked with -inf do not contribute
        owns, picks, means = _of_all(torch.stack([own, picked, mean]), share.channel).unbind(1)
        normalizer = owns.logsumexp(0)
        ctx.save_for_backward(saved, own, normalizer, column, temperatures, inside)
        ctx.dtype, ctx.keeps_probabilities = logits.dtype, entropy
        weights = (owns - normalizer).exp()
        spread = normalizer - (weights * means).sum(0) if entropy else normalizer.new_zeros(0)
        ctx.mark_non_differentiable(spread)
        return picks.sum(0) - normalizer, spread

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor, _: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        saved, own, normalizer, column, temperatures, inside = ctx.saved_tensors
        weight = (grad / temperatures)[:, None]
        if ctx.keeps_probabilities:
            gradient = saved * (-weight * (own - normalizer).exp()[:, None])
        else:
            gradient = (saved - normalizer[:, None]).exp_().mul_(-weight)
        return gradient.scatter_add_(-1, column, weight * inside[:, None]).to(ctx.dtype), None, None, None, None


def _of_all(numbers: Tensor, channel: Channel) -> Tensor:
    return channel.all_gather_tensor(numbers.reshape(-1)).view(channel.size, *numbers.shape)
