"""Record the log-prob and the clip flag that an update computes for each token. The run's sample files contain these values.

Values are recorded only for the rows that :func:`areno.observability.samples.observe` has numbered. The values stay on the
device until :meth:`TokenRecords.take` reads them.
"""

from collections.abc import Sequence

from torch import Tensor

from areno.loss_fns.stats import TokenFlags
from areno.types import TokenRecord, TrainSequence


class TokenRecords:
    """Stores the log-probs and clip flags that this rank has computed since the last call of :meth:`take`.

    A record holds these values for one row. Its key is the row's attribute ``observed``, which is -1 for rows without a record.
    """

    def __init__(self) -> None:
        self._parts: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._done: set[int] = set()  # rows recorded on any rank in an earlier step

    def note(self, rows: Sequence[TrainSequence], logprobs: Tensor, clipped: TokenFlags | None) -> None:
        """Record the log-probs and clip flags of a forward pass over ``rows``.

        ``logprobs`` and ``clipped`` have one entry for each token of the concatenated rows, except for the first token of each
        row. Rows whose ``observed`` is -1, and rows that already have a record, are skipped.
        """
        start = 0
        for row in rows:
            end = start + len(row.tokens) - 1  # the action axis has no entry for a row's first token
            if row.observed >= 0 and row.observed not in self._parts and row.observed not in self._done:
                flags = None if clipped is None else clipped.values[start:end]
                self._parts[row.observed] = logprobs.detach()[start:end], flags
            start = end

    def complete(self, rows: Sequence[TrainSequence]) -> None:
        """Mark ``rows`` as recorded, so that :meth:`note` skips later passes over these rows."""
        self._done.update(row.observed for row in rows)

    def take(self) -> dict[int, TokenRecord]:
        """Return all records, and discard them. The key of a record is the attribute ``observed`` of its row."""
        parts, self._parts, self._done = self._parts, {}, set()
        return {
            number: TokenRecord([0.0, *values.tolist()], None if flags is None else [False, *flags.tolist()])
            for number, (values, flags) in parts.items()
        }
