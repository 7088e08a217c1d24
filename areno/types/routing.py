"""Records of the experts that routers chose: arrays [tokens, MoE layers, experts per token] of small integers.

MoE layers are in the order of the model's layers. A token without a record has the maximum of the array's dtype, which is not
the id of an expert.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

RoutingRecord = NDArray[np.integer]


def no_expert(record: RoutingRecord) -> int:
    """Return the number stored instead of an expert's id where nothing was recorded."""
    return int(np.iinfo(record.dtype).max)


def of_length(record: RoutingRecord, tokens: int) -> RoutingRecord:
    """Extend a record that covers only a row's first tokens to all ``tokens`` tokens of the row."""
    missing = np.full((tokens - len(record), *record.shape[1:]), no_expert(record), record.dtype)
    return np.concatenate([record, missing])


def continued(parts: Iterable[RoutingRecord | None], tokens: int) -> RoutingRecord | None:
    """Join the records of successive requests, each extending the previous one's tokens, into one record of all ``tokens``.

    If a token has several records, the first counts: that of the pass that sampled the next token. None if there is no record.
    """
    known, pieces = 0, list[RoutingRecord]()
    for part in parts:
        if part is not None and len(part) > known:
            pieces.append(part[known:])
            known = len(part)
    return of_length(np.concatenate(pieces), tokens) if pieces else None
