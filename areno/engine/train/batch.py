"""Rows to one packed microbatch: tokens, attention plan, and the tensors that a loss sees."""

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

# Rows are packed as a tree if it has at most this share of their tokens.
MOST_KEPT = 0.9


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One microbatch on its device."""

    tokens: Tensor  # packed token ids [T]
    plan: PackedPlan  # attention plan over them: sequences end to end, or a tree of sequences that begin alike
    scored: Tensor  # indices on the action axis [A] whose log-probs are needed
    sources: Tensor  # packed position that predicts each of them
    targets: Tensor  # the token to predict at each of them
    temperatures: Tensor  # sampling temperature at each of them
    data: DataPack  # what the loss sees

    def on_action_axis(self, values: Tensor) -> Tensor:
        """Scatter values of the scored actions to the whole action axis, 0 elsewhere."""
        mask = self.data["packed_response_mask"]
        return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).index_copy(0, self.scored, values)


def pack_rows(
    rows: Sequence[TrainSequence],
    device: torch.device | str = "cpu",
    tree: bool = False,
    routers: Routers | None = None,
    count: RoutingCount | None = None,
) -> PackedBatch:
    """Pack rows end to end; with ``tree`` tokens that several begin with are there once, if that saves a tenth of all.

    What the loss sees is the same; see :mod:`areno.loss_fns.loss_interface` for the keys of ``data``. ``routers`` of the model
    choose what rows have recorded, which ``count`` counts.
    """
    lengths = [len(row.tokens) for row in rows]
    tokens = torch.tensor(list(chain.from_iterable(row.tokens for row in rows)))
    fed, places = tokens, torch.arange(len(tokens))  # what the model gets, and the place there of each token
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
    for key, name, dtype in _STREAMS:
        stream = _stream(rows, name, actions, dtype)
        if stream is not None:
            data[key] = upload(stream, device)
    return PackedBatch(
        tokens=upload(fed, device),
        plan=plan,
        scored=upload(scored, device),
        sources=upload(places[actions[scored] - 1], device),
        targets=upload(tokens[actions[scored]], device),
        temperatures=upload(temperatures[scored], device),
        data=cast(DataPack, RowData(data)),
    )


_STREAMS = (
    ("packed_logprobs", "logprobs", torch.float32),
    ("packed_advantages", "advantages", torch.float32),
    ("packed_ref_logprobs", "ref_logprobs", torch.float32),
    ("packed_values", "values", torch.float32),
    ("packed_returns", "returns", torch.float32),
    ("packed_prox_logprobs", "prox_logprobs", torch.float32),
    ("packed_teacher_logprobs", "teacher_logprobs", torch.float32),
    ("packed_versions", "versions", torch.int64),
    ("packed_keep", "keep", torch.bool),
)


def _stream(rows: Sequence[TrainSequence], name: str, actions: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A per-token list of all rows on the action axis; absent where no row has it."""
    lists = [getattr(row, name) for row in rows]
    if not any(lists):
        return None
    filled = (values or [0.0] * len(row.tokens) for row, values in zip(rows, lists, strict=True))
    return torch.tensor(list(chain.from_iterable(filled)), dtype=dtype)[actions]


def refuse_mixed(rows: Sequence[TrainSequence]) -> None:
    """All rows of a train call bring the same per-token lists; zeros made up for some would be trained on."""
    for _, name, _ in _STREAMS:
        lacking = [index for index, row in enumerate(rows) if not getattr(row, name)]
        if lacking and len(lacking) < len(rows):
            raise ValueError(f"row {lacking[0]} has no {name}, other rows have; give it to all rows or to none")


def count_units(rows: Sequence[TrainSequence], unit: Reduction) -> int:
    """How many units of a loss's mean some rows hold."""
    if unit == "token":
        return sum(sum(row.trainable()) for row in rows)
    return len(rows) if unit == "sequence" else len(rows) // 2
