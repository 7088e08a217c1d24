"""Combine the recorded MoE expert choices of several rows into one :class:`Replay` for a forward pass over these rows.

:mod:`areno.engine.model.routing` explains routing replay.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from areno.engine.device import upload
from areno.engine.model.routing import Replay, Routers, RoutingCount
from areno.types.routing import RoutingRecord, no_expert


def replay_of(
    records: Sequence[RoutingRecord | None],
    lengths: Sequence[int],
    routers: Routers,
    device: torch.device | str,
    places: Tensor | None = None,
    count: RoutingCount | None = None,
) -> Replay | None:
    """Create the :class:`Replay` of a forward pass from the records of its rows; None if no row has a record.

    Args:
        records: for each row, its recorded expert choices, or None.
        lengths: number of tokens of each row.
        routers: the model's routers.
        device: device of the model.
        places: for each token of the concatenated rows, its position in the input of the forward pass. None if the input
            is the concatenation of the rows. If the input contains a common prefix of several rows only once, the expert
            choices of a prefix token come from the first row that has a record for this token.
        count: counter of the replayed choices, or None.

    Raises:
        ValueError: a record comes from another model, a record is longer than its row, or ``records`` and ``lengths``
            differ in length.
    """
    if all(record is None for record in records):
        return None
    kind = np.uint8 if routers.kind == torch.uint8 else np.int16
    made = np.full((sum(lengths), routers.mixtures, routers.each), np.iinfo(kind).max, kind)
    starts = accumulate(lengths[:-1], initial=0)
    for start, length, record in zip(starts, lengths, records, strict=True):
        if record is not None:
            _check(record, length, made)
            made[start : start + len(record)] = record
    if places is not None:
        made = _at(made, places.numpy())
    return Replay(upload(torch.from_numpy(made), device), routers, count)


def _check(record: RoutingRecord, length: int, made: RoutingRecord) -> None:
    if len(record) > length:
        raise ValueError(
            f"the routed_experts of a row have {len(record)} entries, but the row has {length} tokens; provide at most one "
            "entry per token"
        )
    if record.shape[1:] != made.shape[1:] or record.dtype != made.dtype:
        raise ValueError(
            "cannot replay the routed_experts of a row, because the record comes from another model: the record has the shape "
            f"{list(record.shape)} and the dtype {record.dtype}, but records of this model have the shape "
            f"[tokens, {made.shape[1]}, {made.shape[2]}] (tokens, routers, experts per token) and the dtype "
            f"{made.dtype}; pass records of this model"
        )


def _at(records: RoutingRecord, places: np.ndarray) -> RoutingRecord:
    replayed = np.full((int(places.max()) + 1, *records.shape[1:]), no_expert(records), records.dtype)
    known = (records[:, 0, 0] != no_expert(records)).nonzero()[0][::-1]  # the first row is written last, so it counts
    replayed[places[known]] = records[known]
    return replayed
