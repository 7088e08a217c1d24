"""Context parallelism: the ranks of a replica divide the tokens of each pass. In attention, the ranks divide the attention
heads instead (Ulysses, Jacobs et al. 2023, arXiv:2309.14509).

Each rank computes the embeddings, layers and output layer for a contiguous range of tokens. Attention needs all tokens of a
sequence, so an all-to-all gives each rank all tokens of some heads. The rank computes attention for these heads as a single
process would, so packing, token trees, sliding windows and attention sinks need no special code. All ranks have the same number
of heads, so attention is the same amount of work on each rank. A second all-to-all returns each output to the rank of its
token. With c ranks, each all-to-all sends (c - 1) / c of a rank's queries, keys, values or outputs.

In grouped-query attention, key heads are repeated if c does not divide the number of key heads. If c does not divide the number
of query heads, heads of zeros are added. Using more ranks than heads wastes compute.

The ranks exchange the predictions for their tokens, such as log-probs, so all ranks compute the same loss. In the backward
pass, each rank computes only the part of a weight's gradient that belongs to its own tokens. The weight's gradient is the sum
of these parts over the ranks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from areno.engine.model.attention import Forward, LayerAttention
from areno.engine.model.packing import PackedPlan
from areno.engine.model.routing import Replay, Routing
from areno.engine.parallel.channels import Channel


class _Exchange(torch.autograd.Function):
    """Exchange values among the ranks, so that each rank gets all tokens of some heads instead of some tokens of all heads.

    With ``size`` ranks, n tokens per rank and H heads of size D, the shape changes from [n, H, D] to [size * n, H / size, D].
    If ``to_heads`` is False, the exchange is reversed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel, to_heads: bool) -> Tensor:
        ctx.channel, ctx.to_heads = channel, to_heads
        return (_to_heads if to_heads else _to_tokens)(x, channel)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return (_to_tokens if ctx.to_heads else _to_heads)(grad, ctx.channel), None, None


class _AllGather(torch.autograd.Function):
    """Gather x [n, ...] from all ``size`` ranks into [size * n, ...].

    All ranks use the result, so the backward pass is a reduce-scatter.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel) -> Tensor:
        ctx.channel = channel
        return channel.all_gather_tensor(x.reshape(-1)).view(channel.size * len(x), *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        part = ctx.channel.reduce_scatter(grad.reshape(-1))
        return part.view(len(grad) // ctx.channel.size, *grad.shape[1:]), None


class _Sum(torch.autograd.Function):
    """Sum a tensor over the ranks.

    All ranks compute the same loss from the sum, so the backward pass needs no communication.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel) -> Tensor:
        return channel.all_reduce(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def _to_heads(x: Tensor, channel: Channel) -> Tensor:
    tokens, heads, size = x.shape
    parts = x.view(tokens, channel.size, heads // channel.size, size).transpose(0, 1).reshape(-1)
    return channel.all_to_all(parts).view(channel.size * tokens, heads // channel.size, size)


def _to_tokens(x: Tensor, channel: Channel) -> Tensor:
    tokens, heads, size = len(x) // channel.size, *x.shape[1:]
    parts = channel.all_to_all(x.reshape(-1)).view(channel.size, tokens, heads, size)
    return parts.transpose(0, 1).reshape(tokens, channel.size * heads, size)


class ContextPlan:
    """Determines which tokens this rank's tokens attend to.

    ``whole`` is the attention plan for the tokens of all ranks. If the ranks cannot divide these tokens evenly, padding follows
    the last token.
    """

    def __init__(self, whole: PackedPlan, channel: Channel) -> None:
        self.whole, self.channel = whole, channel
        self.count = -(-whole.tokens // channel.size)
        self.first = channel.rank * self.count
        self.position_ids = self.own(whole.position_ids)
        replay = whole.routing
        own = replay.part(self.first, self.count) if isinstance(replay, Replay) else None
        self.routing: Routing | None = own

    def own(self, values: Tensor) -> Tensor:
        """Return the values [n, ...] of this rank's n tokens, given the ``values`` [T, ...] of all T tokens.

        In the result, the values of padding tokens are zeros.
        """
        part = values[self.first : self.first + self.count]
        missing = self.count - len(part)
        return pad(part, (0, 0) * (values.dim() - 1) + (0, missing)) if missing else part

    def within(self, positions: Tensor) -> Tensor:
        """Return the indices i for which this rank computes the token at ``positions[i]`` of the packed batch."""
        return ((positions >= self.first) & (positions < self.first + self.count)).nonzero()[:, 0]

    def sum(self, values: Tensor) -> Tensor:
        """Sum values over the ranks. Each rank passes its own entries, and zeros for all other entries."""
        return _Sum.apply(values, self.channel)  # type: ignore[no-any-return]

    def attend(self, layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention outputs of this rank's n tokens, which attend to the tokens of all ranks.

        The shapes are q [n, heads, D], k [n, key heads, D], v [n, key heads, Dv] and outputs [n, heads, Dv].
        """
        heads, size, total = q.shape[1], self.channel.size, self.whole.tokens
        repeats = _repeats(heads, k.shape[1], size)
        padded = -(-heads // size) * size
        if repeats > 1:
            k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        if padded > heads:  # then keys and values have as many heads as queries
            q, k, v = (pad(x, (0, 0, 0, padded - heads)) for x in (q, k, v))
        if layer.sinks is not None:
            own = padded // size
            sinks = pad(layer.sinks, (0, padded - heads))[self.channel.rank * own :][:own]
            layer = dataclasses.replace(layer, sinks=sinks)
        q, k, v = (_Exchange.apply(x, self.channel, True)[:total] for x in (q, k, v))
        attended = self._padded(self.whole.attend(layer, q, k, v))
        return _Exchange.apply(attended, self.channel, False)[:, :heads]  # type: ignore[no-any-return]

    def run_recurrent(self, module: nn.Module, forward: Forward, hidden: Tensor) -> Tensor:
        """Run a recurrent layer on the tokens of all ranks, because a recurrent state depends on all earlier tokens.

        ``hidden`` and the result are [tokens of this rank, hidden size].
        """
        gathered = _AllGather.apply(hidden, self.channel)[: self.whole.tokens]
        return self.own(self.whole.run_recurrent(module, forward, gathered))

    def _padded(self, values: Tensor) -> Tensor:
        return pad(values, (0, 0, 0, 0, 0, self.channel.size * self.count - len(values)))


def _repeats(queries: int, keys: int, size: int) -> int:
    """Return how many copies of each key head are needed, so that each rank has the key heads for its query heads."""
    each = queries // keys
    fitting = (n for n in range(1, each + 1) if each % n == 0 and keys * n % size == 0)
    return next(fitting, each)
