"""What a loss function sees of a microbatch, and how it says what its mean runs over.

A loss is ``loss_fn(data_pack, logprobs) -> loss | (loss, metrics)``. ``logprobs`` and all ``packed_*`` tensors lie on the
*action axis*: the sequences of the microbatch end to end, each without its first token, because nothing predicts that
one; the length is the sum of ``len(tokens) - 1``. Log-probs outside the response mask are 0 and carry no gradient.

A loss returns the mean over its units in the microbatch. The engine weights each microbatch by its share of the units of
the whole optimizer step, so that the split into microbatches changes nothing. Units are tokens unless declared otherwise
with :func:`reduces_over`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypedDict, TypeVar

from torch import Tensor

Reduction = Literal["token", "sequence", "pair"]
LossFn = Callable[..., Any]
F = TypeVar("F", bound=Callable[..., Any])


class DataPack(TypedDict, total=False):
    """Keys of ``data_pack``; A is the length of the action axis.

    Attributes:
        packed_response_mask: bool [A], tokens that count.
        packed_logprobs: rollout log-probs [A].
        packed_advantages: advantages [A].
        packed_ref_logprobs: reference log-probs [A], where the rows have them.
        packed_values: old values [A], where the rows have them.
        packed_returns: value targets [A], where the rows have them.
        packed_seq_ids: sequence of each action, 0 to packed_num_sequences - 1 [A].
        packed_num_sequences: sequences in the microbatch.
        packed_tokens: the tokens that the actions chose [A].
        rewards: scalar reward of each sequence [packed_num_sequences].
    """

    packed_response_mask: Tensor
    packed_logprobs: Tensor
    packed_advantages: Tensor
    packed_ref_logprobs: Tensor
    packed_values: Tensor
    packed_returns: Tensor
    packed_seq_ids: Tensor
    packed_num_sequences: int
    packed_tokens: Tensor
    rewards: Tensor


def reduces_over(unit: Reduction) -> Callable[[F], F]:
    """Declare what a loss averages over: ``token``, ``sequence`` or ``pair`` (two neighbouring rows)."""

    def declare(fn: F) -> F:
        fn.reduction = unit  # type: ignore[attr-defined]
        return fn

    return declare


def reduction_of(loss_fn: LossFn) -> Reduction:
    """The declared unit of a loss, also through ``functools.partial``; ``token`` where none is declared."""
    return getattr(_unwrapped(loss_fn), "reduction", "token")


def declares_reduction(loss_fn: LossFn) -> bool:
    """Whether a loss says what it averages over, so that its rows may be split at will."""
    return hasattr(_unwrapped(loss_fn), "reduction")


def _unwrapped(loss_fn: LossFn) -> LossFn:
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    return loss_fn


def sequence_sums(values: Tensor, pack: DataPack) -> Tensor:
    """Sum of values [A] over each sequence [packed_num_sequences]."""
    zeros = values.new_zeros(pack["packed_num_sequences"])
    return zeros.index_add(0, pack["packed_seq_ids"], values)
