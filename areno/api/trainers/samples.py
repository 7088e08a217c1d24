"""One completion, agent's run or workflow's row on its way from a prompt to training rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from areno.api.agentic.samples import AgentSample
from areno.api.records import reward_record
from areno.rollouts.conversation.rows import TrajectoryRow, completion_row
from areno.rollouts.trajectory import trajectory_row
from areno.types import PromptBatch, PromptItem, RewardRecord, RolloutSequence

REWARD = "reward"
"""Where the metadata of a workflow's record have the reward that the workflow gave."""


@dataclass(slots=True)
class Sample:
    """One completion on its way to a training row."""

    item: PromptItem
    prompt_index: int
    sample_index: int
    sequence: RolloutSequence
    record: RewardRecord
    agent: AgentSample | None = None
    row: TrajectoryRow | None = None
    reward: float = 0.0
    advantage: float = 0.0

    @classmethod
    def of_agent(cls, sample: AgentSample, batch: PromptBatch) -> Sample:
        """What an agent has done for a prompt of a batch."""
        prompt, index = sample.item.prompt_index, sample.item.sample_index
        return cls(batch.items[prompt], prompt, index, sample.sequence, sample.record, sample)

    @property
    def tokens(self) -> list[int]:
        """Prompt and response; of an agent's conversations the last one."""
        if self.agent is not None:
            return self.agent.rows[-1].tokens
        return [*self.item.input_tokens, *self.sequence.resp_tokens] if self.row is None else self.row.tokens

    @property
    def empty(self) -> bool:
        """Whether there is nothing to train on."""
        if self.agent is not None:
            return not self.agent.rows
        return not (self.sequence.resp_tokens if self.row is None else any(self.row.trained[1:]))

    def rows(self) -> list[TrajectoryRow]:
        """What is trained on."""
        if self.agent is not None:
            return self.agent.rows
        return [] if self.empty else [self.row or completion_row(self.item.input_tokens, self.sequence)]


def workflow_sample(
    tokenizer: Any, item: PromptItem, prompt_index: int, sample_index: int, fields: dict[str, Any]
) -> Sample:
    """One row of a workflow's trajectory, with the reward that it came with.

    Args:
        tokenizer: the model's.
        item: the prompt that the workflow was given.
        prompt_index: its place in the batch.
        sample_index: which of the prompt's samples it is.
        fields: see :func:`areno.rollouts.trajectory.samples_of`.
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
    record.metadata[REWARD] = float(fields["rewards"])
    return Sample(item, prompt_index, sample_index, sequence, record, row=row)
