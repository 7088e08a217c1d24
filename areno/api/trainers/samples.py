"""Functions for the samples of a step: limit on failures, conversion of workflow trajectories, training rows per sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

from areno.api.records import Sample, reward_record
from areno.rollouts.trajectory import reward_of, trajectory_row
from areno.types import PromptItem, RolloutSequence, TrainSequence

REWARD = "reward"
"""Key under which :func:`workflow_sample` stores the reward in the metadata of the sample's record."""


def too_many_failures(failed: int, total: int, unit: str, most: float) -> str:
    """Describe the failures of a step if the run must stop; otherwise, return an empty string.

    The run must stop if all samples or prompts failed, or if more than the fraction ``most`` failed.
    """
    if failed and failed == total:
        return f"all {total} {unit} of this step"
    if failed > most * total:
        return f"{failed} of {total} {unit}, more than --agent-max-failures {most:g} allows"
    return ""


def rows_of(samples: Sequence[Sample], rows: Sequence[TrainSequence]) -> list[list[TrainSequence]] | None:
    """Group training rows by sample. Returns None if a user's trainer has added or removed rows."""
    if sum(len(sample.rows) for sample in samples) != len(rows):
        return None
    remaining = iter(rows)
    return [list(islice(remaining, len(sample.rows))) for sample in samples]


def workflow_sample(
    tokenizer: Any, item: PromptItem, prompt_index: int, sample_index: int, fields: dict[str, Any]
) -> Sample:
    """Create a sample from one row of the trajectory that a workflow returned.

    ``fields`` is this row as a dictionary, as :func:`areno.rollouts.trajectory.samples_of` yields it. It includes the reward.
    """
    row = trajectory_row(fields)
    sampled = [position for position, is_sampled in enumerate(row.sampled) if is_sampled]
    start = sampled[0] if sampled else len(row.tokens)
    sequence = RolloutSequence(
        [row.tokens[position] for position in sampled],
        [row.logprobs[position] for position in sampled],
        "length" if row.truncated else "stop",
        text=str(tokenizer.decode(row.tokens[start:], skip_special_tokens=True)),
        versions=[row.versions[position] for position in sampled],
        temperature=row.temperature,
        cut_mass=math.nan,  # trajectories do not contain it
    )
    record = reward_record(item, prompt_index, sample_index, sequence)
    record.loss_mask = [row.trained[position] for position in sampled]
    record.metadata[REWARD] = reward_of(fields)
    rows = [row] if any(row.trained[1:]) else []
    return Sample(item, prompt_index, sample_index, sequence, record, row.tokens, rows)
