"""One completion, agent's run or workflow's row on its way from a prompt to training rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areno.api.agentic.samples import AgentSample
from areno.api.evaluation import Answer
from areno.api.records import reward_record
from areno.rollouts.conversation.trajectory_rows import TrajectoryRow, completion_row
from areno.rollouts.trajectory import reward_of, trajectory_row
from areno.types import PromptBatch, PromptItem, RewardRecord, RolloutSequence

REWARD = "reward"
"""Where the metadata of a workflow's record have the reward that the workflow gave."""


@dataclass(slots=True)
class Sample:
    """One completion, run of an agent, or row of a workflow, on its way to training rows."""

    item: PromptItem
    prompt_index: int
    sample_index: int
    sequence: RolloutSequence  # all that the policy said
    record: RewardRecord  # what a reward function sees
    tokens: list[int]  # what a reward model reads: prompt and response; of an agent's conversations the last one
    rows: list[TrajectoryRow]  # what is trained on
    turn_rewards: Sequence[float] = ()  # what an agent's environment gave for each turn
    reward: float = 0.0
    advantage: float = 0.0

    @classmethod
    def of_completion(cls, item: PromptItem, prompt_index: int, sample_index: int, sequence: RolloutSequence) -> Sample:
        """An answer of the policy; without a token it gives no row."""
        record, row = (
            reward_record(item, prompt_index, sample_index, sequence),
            completion_row(item.input_tokens, sequence),
        )
        return cls(
            item, prompt_index, sample_index, sequence, record, row.tokens, [row] if sequence.resp_tokens else []
        )

    @classmethod
    def of_agent(cls, sample: AgentSample, batch: PromptBatch) -> Sample:
        """What an agent has done for a prompt of a batch."""
        item = batch.items[sample.item.prompt_index]
        tokens = sample.rows[-1].tokens if sample.rows else [*sample.item.input_tokens]
        indices = sample.item.prompt_index, sample.item.sample_index
        return cls(item, *indices, sample.sequence, sample.record, tokens, sample.rows, sample.turn_rewards)

    @property
    def answer(self) -> Answer:
        """What an evaluation needs of it."""
        return Answer(self.record, self.tokens, self.sequence)


def workflow_sample(
    tokenizer: Any, item: PromptItem, prompt_index: int, sample_index: int, fields: dict[str, Any]
) -> Sample:
    """One row of a workflow's trajectory, with the reward that it came with.

    ``fields`` are those of :func:`areno.rollouts.trajectory.samples_of`; the indices are as in :class:`Sample`.
    """
    row = trajectory_row(fields)
    said = [place for place, sampled in enumerate(row.sampled) if sampled]
    begin = said[0] if said else len(row.tokens)
    sequence = RolloutSequence(
        [row.tokens[place] for place in said],
        [row.logprobs[place] for place in said],
        "length" if row.truncated else "stop",
        text=str(tokenizer.decode(row.tokens[begin:], skip_special_tokens=True)),
        versions=[row.versions[place] for place in said],
        temperature=row.temperature,
    )
    record = reward_record(item, prompt_index, sample_index, sequence)
    record.loss_mask = [row.trained[place] for place in said]
    record.metadata[REWARD] = reward_of(fields)
    rows = [row] if any(row.trained[1:]) else []
    return Sample(item, prompt_index, sample_index, sequence, record, row.tokens, rows)
