"""Pack rows into a microbatch, which consists of tokens, an attention plan, and the tensors that a loss receives."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, cast

import torch
from torch import Tensor

from areno.engine.device import upload
from areno.engine.model.packing import PackedPlan
from areno.engine.model.routing import Routers, RoutingCount
from areno.engine.model.tree import TokenTree, TreePlan
from areno.engine.train.replay import replay_of
from areno.loss_fns.loss_interface import DataPack, Reduction, RowData
from areno.types import TrainSequence

# Rows are packed as a tree if the tree has at most this share of the rows' tokens.
MOST_KEPT = 0.9


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A microbatch on the model's device."""

    tokens: Tensor  # packed token ids [T]
    plan: PackedPlan  # the tokens' attention plan: concatenated sequences, or a tree of sequences with common prefixes
    scored: Tensor  # indices on the action axis [A] of the actions that are trained on
    sources: Tensor  # packed position that predicts each scored action
    targets: Tensor  # token to predict for each scored action
    temperatures: Tensor  # sampling temperature of each scored action
    data: DataPack  # what the loss receives

    def on_action_axis(self, values: Tensor) -> Tensor:
        """Expand ``values`` to the action axis [A], which has one entry per token, except for the first token of each row.

        ``values`` has one entry per scored action, which is a token that is trained on. In the result, the entries of all
        other tokens are 0.
        """
        mask = self.data["packed_response_mask"]
        return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).index_copy(0, self.scored, values)


def pack_rows(
    rows: Sequence[TrainSequence],
    device: torch.device | str = "cpu",
    tree: bool = False,
    routers: Routers | None = None,
    count: RoutingCount | None = None,
) -> PackedBatch:
    """Concatenate rows into a microbatch.

    With ``tree``, a common prefix of several rows is packed once instead of once per row. If this saves less than 10% of
    the tokens, ``tree`` has no effect. The loss receives the same data with and without ``tree``;
    :mod:`areno.loss_fns.loss_interface` lists the keys of this data. With ``routers``, the recorded expert choices of the
    rows are replayed. The counter ``count``, if given, counts the replayed choices.
    """
    lengths = [len(row.tokens) for row in rows]
    tokens = torch.tensor(list(chain.from_iterable(row.tokens for row in rows)))
    fed, places = tokens, torch.arange(len(tokens))  # the model's input, and each token's position in it
    shared = TokenTree()
    paths = [shared.add(row.tokens) for row in rows] if tree and len(rows) > 1 else []
    plan: PackedPlan | None = None
    if paths and len(shared.tokens) <= MOST_KEPT * len(tokens):
        places = torch.tensor(list(chain.from_iterable(paths)))
        fed, plan = torch.tensor(shared.tokens), TreePlan(paths, device)
    plan = plan or PackedPlan(lengths, device)
    if routers is not None:
        records = [row.routed_experts for row in rows]
        plan.routing = replay_of(records, lengths, routers, device, places if len(fed) < len(tokens) else None, count)
    first = torch.zeros(len(tokens), dtype=torch.bool)
    first[list(accumulate(lengths[:-1], initial=0))] = True
    actions = (~first).nonzero()[:, 0]
    mask = torch.tensor(list(chain.from_iterable(row.trainable() for row in rows)))[actions]
    sequence = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))[actions]
    scored = mask.nonzero()[:, 0]
    temperatures = torch.tensor([row.temperature for row in rows])[sequence]
    data: dict[str, Any] = {
        "packed_response_mask": upload(mask, device),
        "packed_seq_ids": upload(sequence, device),
        "packed_num_sequences": len(rows),
        "packed_tokens": upload(tokens[actions], device),
        "rewards": upload(torch.tensor([row.reward for row in rows]), device),
    }
    for name, dtype in _STREAMS.items():
        stream = _stream(rows, name, actions, dtype)
        if stream is not None:
            data[f"packed_{name}"] = upload(stream, device)
    return PackedBatch(
        tokens=upload(fed, device),
        plan=plan,
        scored=upload(scored, device),
        sources=upload(places[actions[scored] - 1], device),
        targets=upload(tokens[actions[scored]], device),
        temperatures=upload(temperatures[scored], device),
        data=cast(DataPack, RowData(data)),
    )


_NUMBERS = ("logprobs", "advantages", "ref_logprobs", "values", "returns", "prox_logprobs", "teacher_logprobs")
# The per-token lists of rows, and their dtypes. The list ``name`` has the key ``packed_<name>``.
_STREAMS = {**dict.fromkeys(_NUMBERS, torch.float32), "versions": torch.int64, "keep": torch.bool}


def _stream(rows: Sequence[TrainSequence], name: str, actions: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Concatenate one per-token list of each row, such as the advantages. Return the entries at the indices ``actions``.

    ``name`` is the attribute of the rows that holds the list. ``actions`` are the indices of all tokens except the first
    token of each row. Return None if no row has this list.
    """
    lists = [getattr(row, name) for row in rows]
    if not any(lists):
        return None
    filled = (values or [0.0] * len(row.tokens) for row, values in zip(rows, lists, strict=True))
    return torch.tensor(list(chain.from_iterable(filled)), dtype=dtype)[actions]


def refuse_mixed(rows: Sequence[TrainSequence]) -> None:
    """Raise ValueError if some rows lack a per-token list that other rows have.

    Without this check, training would use zeros for the missing lists.
    """
    for name in _STREAMS:
        lacking = [index for index, row in enumerate(rows) if not getattr(row, name)]
        if lacking and len(lacking) < len(rows):
            raise ValueError(
                f"row {lacking[0]} has no {name}, but other rows have {name}; set {name} in all rows or in none of the rows"
            )


def count_units(rows: Sequence[TrainSequence], unit: Reduction) -> int:
    """Count the trained tokens, the sequences or the pairs in ``rows``. ``unit`` selects which of these are counted."""
    if unit == "token":
        return sum(sum(row.trainable()) for row in rows)
    return len(rows) if unit == "sequence" else len(rows) // 2
