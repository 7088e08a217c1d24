"""Records of the experts that routers chose: arrays [tokens, mixtures, experts per token] of small integers.

The mixtures are those of the model in the order of its layers. A token without a record has the largest number of the array's
type, which is no expert's.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

RoutingRecord = NDArray[np.integer]


def no_expert(record: RoutingRecord) -> int:
    """What stands in the place of an expert where nothing was recorded."""
    return int(np.iinfo(record.dtype).max)


def of_length(record: RoutingRecord, tokens: int) -> RoutingRecord:
    """A record of the first tokens of a row as one of all its ``tokens``."""
    missing = np.full((tokens - len(record), *record.shape[1:]), no_expert(record), record.dtype)
    return np.concatenate([record, missing])


def continued(parts: Iterable[RoutingRecord | None], tokens: int) -> RoutingRecord | None:
    """The record of a row of ``tokens`` from those of requests, each of which began with all tokens of the ones before.

    The first record of a token counts: it is from the pass that the next token was sampled from. None if there is no record.
    """
    known, pieces = 0, list[RoutingRecord]()
    for part in parts:
        if part is not None and len(part) > known:
            pieces.append(part[known:])
            known = len(part)
    return of_length(np.concatenate(pieces), tokens) if pieces else None
