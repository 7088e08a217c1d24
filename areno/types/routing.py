"""Records of the experts that routers chose, as integer arrays [tokens, MoE layers, experts per token].

MoE layers are in the order of the model's layers. If a token has no record, its entries are the maximum of the dtype, which is
never the id of an expert.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

RoutingRecord = NDArray[np.integer]


def no_expert(record: RoutingRecord) -> int:
    """Return the filler value for tokens whose experts were not recorded."""
    return int(np.iinfo(record.dtype).max)


def continued(parts: Iterable[RoutingRecord | None], tokens: int) -> RoutingRecord | None:
    """Join the records of a conversation's requests into a record of ``tokens`` tokens.

    Each request begins with all tokens of the previous request, so several requests may record the same token. The token's
    earliest record is used, because later requests process the token again, and may choose other experts than those used in
    sampling. Returns None if there is no record.
    """
    known, pieces = 0, list[RoutingRecord]()
    for part in parts:
        if part is not None and len(part) > known:
            pieces.append(part[known:])
            known = len(part)
    if not pieces:
        return None
    missing = np.full((tokens - known, *pieces[0].shape[1:]), no_expert(pieces[0]), pieces[0].dtype)
    return np.concatenate([*pieces, missing])
