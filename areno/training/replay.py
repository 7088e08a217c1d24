"""The inputs of a replay: the recorded rows of a step, and the checkpoint before the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areno.errors import UsageError
from areno.storage.checkpoint_folder import CheckpointFolder
from areno.storage.rollout_files import RolloutFiles
from areno.storage.run_dir import RunDirectory
from areno.storage.run_layout import checkpoints_of
from areno.storage.sample_index import FLAGS
from areno.training.saved_rows import SavedRows, rows_of_arrays, rows_of_samples
from areno.types import RewardParts, TrainSequence, parts_of

STATISTICS = ("train/", "ppo_actor/update/", "ppo_critic/")
"""Prefixes of the names of update statistics."""
_MEASURED = ("_time_s", "/tokens_per_second")


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recorded step that is to be replayed: its rows, and the checkpoint from which the replay starts.

    Attributes:
        step: number of the recorded step, from 0.
        complete: whether all rows of the step were recorded.
        checkpoint: path of the checkpoint from which the replay starts; None for the initial model.
        start: number of completed steps in the checkpoint. If ``start`` is equal to ``step``, the replay starts from the
            same weights as the recorded step. Otherwise, it starts from older weights.
        reshapes: whether advantages are recomputed from the rewards. By default, the recorded advantages are used.
    """

    step: int
    updates: int
    saved: SavedRows
    complete: bool
    start: int
    checkpoint: Path | None
    reshapes: bool = False

    def firsts(self) -> list[TrainSequence]:
        """Return the first row of each sample. A sample of an agent may have several rows.

        The ``reward`` and the ``group`` of the first row are those of the sample.
        """
        by_sample = dict(zip(reversed(self.saved.samples), reversed(self.saved.rows), strict=True))
        return [by_sample[sample] for sample in dict.fromkeys(self.saved.samples)]

    def weighed(self, weights: str | Mapping[str, float] | None) -> RecordedStep:
        """Replace rewards with weighted sums of their parts. Raises UsageError if a reward has no parts."""
        if not all(parts_of(row.reward) for row in self.saved.rows):
            raise UsageError(
                "the recorded rewards have no parts, so weights have no effect; remove the option --reward-weights or the "
                "setting reward.weights"
            )
        parts = RewardParts(weights)
        for row in self.saved.rows:
            row.reward = parts.weigh(dict(parts_of(row.reward)))
        return self

    def forget(self, column: str) -> None:
        """Empty a per-token list in all rows, so that its values are recomputed."""
        for row in self.saved.rows:
            setattr(row, column, [])

    def reshaped(self, because: str, by_group: bool) -> RecordedStep:
        """Return a copy whose advantages will be computed from the rewards.

        ``by_group`` is whether the advantage of a sample depends on the rewards of all samples of the same prompt. Raises
        UsageError if ``by_group`` is true, but only some samples of the step were recorded. ``because`` describes the
        changed options, and is the beginning of the error message.
        """
        if by_group and not self.complete:
            raise UsageError(
                f"{because}: the advantages compare all samples of a prompt, but only some samples were recorded; train with "
                "--save-rollouts (rollout.save_rollouts) to record all samples"
            )
        return replace(self, reshapes=True)

    def described(self, base: str) -> list[str]:
        """Return lines that describe the recorded rows, the checkpoint with the starting weights, and the advantages.

        ``base`` is the path of the initial model. If ``checkpoint`` is None, the replay starts from this model.
        """
        kind = (
            "all rows of the step"
            if self.complete
            else "only the recorded samples; the statistics therefore differ from those of the run"
        )
        weights = f"{base}, the initial model" if self.checkpoint is None else str(self.checkpoint)
        missing = self.step - self.start
        began = "the starting weights of the step"
        behind = f"{missing} step{'s' * (missing > 1)} older than {began}" if missing else began
        return [
            f"step {self.step}: {len(self.saved.rows)} rows ({kind})",
            f"weights: {weights} ({behind})",
            f"advantages: {'computed from the recorded rewards' if self.reshapes else 'as recorded'}",
        ]


def find_replay(run: RunDirectory, step: int, updates: int, temperature: float) -> RecordedStep:
    """Read the rows of a step, and find the newest checkpoint before the step.

    Raises:
        UsageError: no rows of the step were recorded.
        ArenoError: the saved rows cannot be read.
    """
    files = RolloutFiles(run.rollouts_path, 0)
    complete = step in files.steps()
    if complete:
        saved = rows_of_arrays(files.read(step))
    else:
        entries = run.read_entries()
        samples = (run.read_sample(entry) for entry in entries[entries["step"] == step])
        saved = rows_of_samples(samples, temperature)
        if not saved.rows:
            with_rows = sorted({*files.steps(), *entries["step"][(entries["flags"] & FLAGS["rows"]) > 0].tolist()})
            known = f"steps {with_rows[0]} to {with_rows[-1]}" if with_rows else "no step"
            raise UsageError(
                f"--step {step}: {run.path} has no training rows of this step; training rows were recorded for {known}"
            )
    newest = CheckpointFolder(checkpoints_of(run.path, "areno replay")).newest_until(step)
    start, checkpoint = newest if newest is not None else (0, None)
    return RecordedStep(step, updates, saved, complete, start, checkpoint)


def compared(recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> dict[str, tuple[float | None, float]]:
    """Return the recorded and the replayed value of each update statistic, except for times and speeds.

    The recorded value is None for a statistic that the run did not record.
    """
    names = [name for name in replayed if name.startswith(STATISTICS) and not name.endswith(_MEASURED)]
    return {name: (recorded.get(name), replayed[name]) for name in names}
