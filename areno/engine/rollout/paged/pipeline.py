"""Let decode steps on the device overlap with work on the host: step k + 1 is launched before the tokens of step k are read.

To launch step k + 1, the host needs only the positions of these tokens. The step itself needs the token ids, which step k
leaves in the memory of the device. The host learns one step late that a sample has stopped, so the sample takes part in one
surplus step. The token of the surplus step is discarded. Tokens of samples that have left the batch are discarded, too.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from areno.engine.rollout.paged.graphs import PAUSED, DeviceDecode, StepResult, StepRow
from areno.engine.rollout.sequence import Sequence

# A sample with its next token and log-prob.
Landed = tuple[Sequence, int, float]


@dataclass(slots=True)
class _Flight:
    """A launched decode step whose tokens have not been read.

    ``rows`` maps each sample to its row in the batch. ``indices`` has one entry per row: the position of the new token in the
    sample's output, or -1 if the step samples no token for the row.
    """

    rows: dict[Sequence, int]
    indices: list[int]
    result: StepResult


class DecodePipeline:
    """Launches each decode step before the tokens of the previous step are read.

    Between method calls, the tokens of at most one launched step are unread.
    """

    def __init__(self, device: DeviceDecode) -> None:
        self.device = device
        self._flight: _Flight | None = None

    def advance(self, running: Seq[Sequence], version: int = 0) -> list[Landed]:
        """Launch the next step for the ``running`` samples, then return the tokens of the previous step."""
        before, self._flight = self._flight, self._launch(running, version)
        return _landed(before, running)

    def drain(self, running: Seq[Sequence]) -> list[Landed]:
        """Return the tokens of the last launched step, without launching another step."""
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
            return PAUSED  # the sample's last token is in flight
        return StepRow(
            position=sequence.length + unread - 1,
            counter=index,
            source=source,
            token=0 if unread else sequence.last_token,
            seed=sequence.seed,
            sampling=sequence.group.sampling,
        )

    def _source(self, sequence: Sequence) -> int:
        flight = self._flight
        if flight is None or sequence not in flight.rows:
            return -1
        row = flight.rows[sequence]
        return row if flight.indices[row] == len(sequence.output) else -1


def _landed(flight: _Flight | None, running: Seq[Sequence]) -> list[Landed]:
    if flight is None:
        return []
    tokens, logprobs = flight.result.read()
    current = set(running)
    rows = zip(flight.rows, flight.indices, tokens, logprobs, strict=True)
    return [
        (sequence, token, logprob)
        for sequence, index, token, logprob in rows
        if sequence in current and index == len(sequence.output)
    ]
