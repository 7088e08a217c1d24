"""The interface of loss functions: the data pack of a microbatch, and the unit that a loss averages over.

A loss is ``loss_fn(data_pack, logprobs) -> loss | (loss, metrics)``. ``logprobs`` and the per-token ``packed_*``
tensors lie on the *action axis*. The action axis concatenates the sequences of the microbatch, each without its first
token, because the first token is never predicted. Log-probs outside the response mask are 0 and have no gradient. A
critic's loss receives values on the action axis instead of log-probs. Entry t is the value before action t. A reward
model's loss receives one score per sequence.

A loss returns the mean over its units in the microbatch: tokens, sequences or pairs. The engine weights each microbatch
by the microbatch's share of the units of the optimizer step. The division into microbatches therefore does not change
the result. The default unit is the token; :func:`reduces_over` declares another unit.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, TypeVar

import torch
from torch import Tensor

Reduction = Literal["token", "sequence", "pair"]
LossFn = Callable[..., Any]
F = TypeVar("F", bound=Callable[..., Any])


class DataPack(TypedDict, total=False):
    """Keys of ``data_pack``. A key such as ``packed_advantages`` is missing if the rows have no ``advantages``.

    [A] is the action axis (see the module): all tokens of the microbatch except the first token of each sequence.
    """

    packed_response_mask: Tensor  # bool [A], tokens that count
    packed_logprobs: Tensor  # rollout log-probs [A]
    packed_advantages: Tensor  # advantages [A]
    packed_ref_logprobs: Tensor  # reference log-probs [A]
    packed_values: Tensor  # old values [A]
    packed_returns: Tensor  # value targets [A]
    packed_seq_ids: Tensor  # sequence of each action, 0 to packed_num_sequences - 1 [A]
    packed_num_sequences: int  # sequences in the microbatch
    packed_entropy: Tensor  # entropy [A], without gradient, 0 outside the mask; for losses with ``entropy=True``
    packed_min_logits: Tensor  # minimum logit [A], without gradient, 0 outside the mask; with ``bounds=True``
    packed_max_logits: Tensor  # maximum logit [A], as for the minimum
    packed_tokens: Tensor  # token of each action [A]
    packed_prox_logprobs: Tensor  # log-probs at the start of the update [A]
    packed_teacher_logprobs: Tensor  # log-probs of a teacher [A]
    packed_versions: Tensor  # int64 [A], version of the weights that sampled each token
    packed_keep: Tensor  # bool [A], False for tokens excluded before the update
    rewards: Tensor  # scalar reward of each sequence [packed_num_sequences]


_LISTS = {
    "packed_logprobs": (
        "logprobs",
        "for a sampled row, use [0.0] * len(prompt) + sequence.resp_logprobs; for rows that were not sampled, call "
        "trainer.score_logprobs('actor', token_rows) before the update",
    ),
    "packed_advantages": ("advantages", "areno.compute_group_advantages computes advantages from rewards"),
    "packed_ref_logprobs": ("ref_logprobs", "trainer.score_logprobs('ref', token_rows) computes the log-probs"),
    "packed_values": (
        "values",
        "values[i] is the critic's value of the tokens before token i of the row. For row k of token_rows, use "
        "values = [0.0, *scores[k][:-1]], where scores = trainer.score_values('critic', token_rows)",
    ),
    "packed_returns": ("returns", "areno.compute_gae computes returns from rewards and values"),
}


class RowData(dict[str, Any]):
    """A data pack. If a key is missing, the error names the argument of :class:`TrainSequence` that sets the missing data."""

    def __missing__(self, key: str) -> Any:
        if key not in _LISTS:
            raise KeyError(key)
        name, remedy = _LISTS[key]
        raise ValueError(f"the loss reads {key}, but the rows have no {name}; set TrainSequence({name}=...): {remedy}")


def reduces_over(
    unit: Reduction | Callable[[Mapping[str, Any]], Reduction], *, entropy: bool = False, bounds: bool = False
) -> Callable[[F], F]:
    """Declare the unit that a loss averages over: ``token``, ``sequence`` or ``pair`` (two neighboring rows).

    Args:
        unit: the unit, or a function that computes the unit from options of the loss. The function receives a
            dictionary: the keyword arguments that the caller has bound to the loss with ``functools.partial``. Without
            bound arguments, the dictionary is empty.
        entropy: whether the loss reads ``packed_entropy`` from its :class:`DataPack`. If so, the engine computes it with
            one more pass over the logits.
        bounds: whether the loss reads ``packed_min_logits`` and ``packed_max_logits``. If so, the engine computes both
            with one more pass over the logits.
    """

    def declare(fn: F) -> F:
        fn.reduction, fn.reads_entropy, fn.reads_bounds = unit, entropy, bounds  # type: ignore[attr-defined]
        return fn

    return declare


def reduction_of(loss_fn: LossFn) -> Reduction:
    """Return the unit that a loss averages over, as declared with :func:`reduces_over`; ``token`` without a declaration.

    ``loss_fn`` may be a loss that ``functools.partial`` wraps.
    """
    inner, bound = _unwrapped(loss_fn)
    unit: Reduction | Callable[[Mapping[str, Any]], Reduction] = getattr(inner, "reduction", "token")
    return unit(bound) if callable(unit) else unit


def declares_reduction(loss_fn: LossFn) -> bool:
    """Return whether a loss declares the unit that it averages over (``token``, ``sequence`` or ``pair``).

    If a loss declares its unit, the result does not depend on the microbatches. The engine may therefore divide the
    rows of a step freely, as long as it keeps pairs together.
    """
    return hasattr(_unwrapped(loss_fn)[0], "reduction")


def reads_entropy(loss_fn: LossFn) -> bool:
    """Return whether a loss requests ``packed_entropy`` (see :class:`DataPack`)."""
    return bool(getattr(_unwrapped(loss_fn)[0], "reads_entropy", False))


def reads_bounds(loss_fn: LossFn) -> bool:
    """Return whether a loss requests ``packed_min_logits`` and ``packed_max_logits`` (see :class:`DataPack`)."""
    return bool(getattr(_unwrapped(loss_fn)[0], "reads_bounds", False))


def name_of(loss_fn: LossFn) -> str:
    """Return the name of a loss, for use in messages."""
    inner = _unwrapped(loss_fn)[0]
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


def knobs_of(loss_fn: LossFn) -> Any:
    """Return the argument ``knobs`` that ``functools.partial`` binds to a loss; None if ``knobs`` is not bound."""
    return _unwrapped(loss_fn)[1].get("knobs")


def _unwrapped(loss_fn: LossFn) -> tuple[LossFn, dict[str, Any]]:
    bound: dict[str, Any] = {}
    while isinstance(loss_fn, functools.partial):
        bound = loss_fn.keywords | bound
        loss_fn = loss_fn.func
    return loss_fn, bound


def required(pack: DataPack, key: str, reader: str, remedy: str) -> Tensor:
    """Return ``pack[key]``. If the pack has no ``key``, raise ValueError.

    The message names what needs the key (``reader``), and tells the user what to do (``remedy``).
    """
    if key not in pack:
        raise ValueError(f"{reader} needs {key}, which this batch lacks; {remedy}")
    return pack[key]  # type: ignore[literal-required,no-any-return]


def in_float(values: Tensor) -> Tensor:
    """Cast values to fp32, because losses never compute in half precision. Values in fp64 are not cast."""
    return values if values.dtype == torch.float64 else values.float()


def split_pairs(values: Tensor, loss: str) -> tuple[Tensor, Tensor]:
    """Split per-sequence values [packed_num_sequences] into the values of chosen and of rejected sequences.

    Each of the two results has the shape [pairs].

    Raises:
        ValueError: the number of sequences is odd.
    """
    if len(values) % 2:
        raise ValueError(
            f"{loss} needs an even number of sequences, got {len(values)}; alternate between chosen and rejected rows, and "
            "keep each pair in one microbatch"
        )
    return values[0::2], values[1::2]


def sequence_sums(values: Tensor, pack: DataPack) -> Tensor:
    """Sum ``values``, which has one entry per token, over the tokens of each sequence. Returns one sum per sequence."""
    zeros = values.new_zeros(pack["packed_num_sequences"])
    return zeros.index_add(0, pack["packed_seq_ids"], values)
