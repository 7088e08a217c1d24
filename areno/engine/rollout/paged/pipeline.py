"""Overlap of host and device: step k + 1 is launched before the tokens of step k are read.

Whatever a launch needs of an unread token is its position, which is known; the token itself goes from step to step on the
device. What the host decides from it comes one step late: a sample that has just ended takes part in one surplus step, and
the surplus token is dropped. A result also counts for nothing when its sample has left the batch in the meantime.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from areno.engine.rollout.paged.graphs import PAUSED, DeviceDecode, StepResult, StepRow
from areno.engine.rollout.sequence import Sequence

# A sample with the token and the log-prob that it is waiting for.
Landed = tuple[Sequence, int, float]


@dataclass(slots=True)
class _Flight:
    """A launched step: row of each sample, and which of its tokens the row makes (-1: none)."""

    rows: dict[Sequence, int]
    indices: list[int]
    result: StepResult


class DecodePipeline:
    """At most one step in flight."""

    def __init__(self, device: DeviceDecode) -> None:
        self.device = device
        self._flight: _Flight | None = None

    def advance(self, running: Seq[Sequence], version: int = 0) -> list[Landed]:
        """Launch the next step for the samples of the first rows, then return the tokens of the step before it."""
        before, self._flight = self._flight, self._launch(running, version)
        return _landed(before, running)

    def drain(self, running: Seq[Sequence]) -> list[Landed]:
        """Launch nothing; return the tokens of the step in flight, which somebody needs before the next one."""
        before, self._flight = self._flight, None
        return _landed(before, running)

    def _launch(self, running: Seq[Sequence], version: int) -> _Flight | None:
        rows = [self._row(sequence) for sequence in running]
        if all(row is PAUSED for row in rows):
            return None
        indices = [row.counter if row is not PAUSED else -1 for row in rows]
        rows_of = {sequence: row for row, sequence in enumerate(running)}
        return _Flight(rows_of, indices, self.device.launch(rows, version))

    def _row(self, sequence: Sequence) -> StepRow:
        source = self._source(sequence)
        unread = source >= 0
        index = len(sequence.output) + unread
        if index >= sequence.group.sampling.max_new_tokens:
            return PAUSED  # its last token is on the way
        return StepRow(
            position=sequence.length + unread - 1,
            counter=index,
            source=source,
            token=0 if unread else sequence.last_token,
            seed=sequence.seed,
            sampling=sequence.group.sampling,
        )

    def _source(self, sequence: Sequence) -> int:
        """Row of the step in flight that makes a sample's next token; -1: the host knows it."""
        flight = self._flight
        if flight is None or sequence not in flight.rows:
            return -1
        row = flight.rows[sequence]
        return row if flight.indices[row] == len(sequence.output) else -1


def _landed(flight: _Flight | None, running: Seq[Sequence]) -> list[Landed]:
    if flight is None:
        return []
    tokens, logprobs = flight.result.read()
    here = set(running)
    rows = zip(flight.rows, flight.indices, tokens, logprobs, strict=True)
    return [
        (sequence, token, logprob)
        for sequence, index, token, logprob in rows
        if sequence in here and index == len(sequence.output)
    ]
