"""Samples of training and evaluation, and the records that reward functions receive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areno.rollouts.conversation.trajectory_rows import TrajectoryRow, completion_row
from areno.types import (
    PromptItem,
    RewardEvent,
    RewardRecord,
    RolloutResult,
    RolloutSequence,
    SamplingParams,
)


@dataclass(slots=True)
class Sample:
    """One sample of training or of an evaluation.

    A sample is a completion, an agent run, or one row of the trajectory that a workflow returned.
    """

    item: PromptItem
    prompt_index: int
    sample_index: int
    sequence: RolloutSequence  # all generated tokens
    record: RewardRecord  # input of a reward function
    tokens: list[int]  # input of a reward model: prompt and response, or the last conversation of an agent
    rows: list[TrajectoryRow]  # rows to train on
    turn_rewards: Sequence[float] = ()  # rewards per turn from an agent's environment
    reward: float = 0.0
    advantage: float = 0.0

    @classmethod
    def of_completion(cls, item: PromptItem, prompt_index: int, sample_index: int, sequence: RolloutSequence) -> Sample:
        """Create the sample of a completion. If the completion has no tokens, ``rows`` is empty."""
        record = reward_record(item, prompt_index, sample_index, sequence)
        row = completion_row(item.input_tokens, sequence)
        rows = [row] if sequence.resp_tokens else []
        return cls(item, prompt_index, sample_index, sequence, record, row.tokens, rows)


def with_texts(results: list[RolloutResult], tokenizer: Any, sampling: SamplingParams) -> list[RolloutResult]:
    """Set the text of each response, and return ``results``. With stop strings, the engine has already set the texts."""
    sequences = [sequence for result in results for sequence in result.sequences]
    if sampling.stop or not sequences:
        return results
    texts = tokenizer.batch_decode(
        [sequence.resp_tokens for sequence in sequences], skip_special_tokens=sampling.skip_special_tokens
    )
    for sequence, text in zip(sequences, texts, strict=True):
        sequence.text = text
    return results


def reward_record(item: PromptItem, prompt_index: int, sample_index: int, sequence: RolloutSequence) -> RewardRecord:
    """Build the record that a reward function receives for one answer.

    Args:
        item: prompt and data row.
        prompt_index: index of the prompt in its batch or, in an evaluation, among all prompts.
        sample_index: index of the answer among all answers to the prompt.
        sequence: the answer.
    """
    prompt = item.record.get("prompt")
    messages: list[dict[str, Any]] = prompt if isinstance(prompt, list) else [{"role": "user", "content": item.prompt}]
    return RewardRecord(
        prompt=item.prompt,
        completion=sequence.text,
        rendered_completion=sequence.text,
        final_answer=sequence.text,
        answer=item.solutions if item.solutions is not None else item.record.get("answer"),
        messages=[*messages, {"role": "assistant", "content": sequence.text}],
        trace=[
            RewardEvent("request", messages=messages),
            RewardEvent("assistant_text", text=sequence.text),
            RewardEvent("finish", text=sequence.finish_reason),
        ],
        tokens=sequence.resp_tokens,
        logprobs=sequence.resp_logprobs,
        loss_mask=[True] * len(sequence.resp_tokens),
        source_record=item.record,
        metadata={
            "prompt_index": prompt_index,
            "sample_index": sample_index,
            "finish_reason": sequence.finish_reason,
        },
    )
