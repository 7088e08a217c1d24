"""What a batch said, for ``samples.jsonl``; prompts are numbered as episodes are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areno.observability.samples import sample_records
from areno.rollouts.tasks import Batch
from areno.types import RewardRecord, TrainSequence


def batch_samples(step: int, batch: Batch, rows: Sequence[TrainSequence], tokenizer: Any) -> list[dict[str, Any]]:
    """Records for ``RunDirectory.append_samples``.

    Args:
        step: index of the step.
        batch: what was trained on.
        rows: its rows, group by group, with their rewards and advantages.
        tokenizer: decodes them.
    """
    seen: dict[int, int] = {}
    records, advantages = [], []
    for row in rows:
        episode = batch.task_ids[row.group]
        seen[row.group] = seen.get(row.group, -1) + 1
        begin = next((place for place, given in enumerate(row.prompt_mask) if not given), len(row.tokens))
        trained = row.trainable()[begin:]
        records.append(
            RewardRecord(
                prompt=tokenizer.decode(row.tokens[:begin]),
                completion=tokenizer.decode(row.tokens[begin:]),
                tokens=row.tokens[begin:],
                logprobs=row.logprobs[begin:],
                loss_mask=trained,
                metadata={
                    "prompt_index": episode,
                    "sample_index": seen[row.group],
                    "finish_reason": "length" if row.truncated else "stop",
                },
            )
        )
        told = [a for a, counts in zip(row.advantages[begin:], trained, strict=False) if counts]
        advantages.append(sum(told) / len(told) if told else 0.0)
    return sample_records(step, records, [row.reward for row in rows], advantages)
