"""From the routing records of rows to the routing of a pass over them."""

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
    """The replay of a pass; None where no row has a record.

    Args:
        records: of each row.
        lengths: tokens of each row.
        routers: of the model.
        device: where the model is.
        places: packed position of each token of all rows, end to end, where rows share tokens; of several records of one, that
            of the first row counts.
        count: what to count the choices in.

    Raises:
        ValueError: a record is of another model, or there is not one per row.
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
        raise ValueError(f"routed_experts have {len(record)} entries for a row of {length} tokens; they must align")
    if record.shape[1:] != made.shape[1:] or record.dtype != made.dtype:
        raise ValueError(
            f"a row's routed_experts are {record.dtype} numbers of the shape {list(record.shape)}, and the model has "
            f"{made.shape[1]} routers that choose {made.shape[2]} experts each, as {made.dtype}: they are of another model"
        )


def _at(records: RoutingRecord, places: np.ndarray) -> RoutingRecord:
    """Records of packed positions from those of tokens."""
    replayed = np.full((int(places.max()) + 1, *records.shape[1:]), no_expert(records), records.dtype)
    known = (records[:, 0, 0] != no_expert(records)).nonzero()[0][::-1]  # the first is written last
    replayed[places[known]] = records[known]
    return replayed
