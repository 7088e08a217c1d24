"""Builds the records that reward functions receive, for training and evaluation."""

from typing import Any

from areno.types import PromptItem, RewardEvent, RewardRecord, RolloutResult, RolloutSequence, SamplingParams


def with_texts(results: list[RolloutResult], tokenizer: Any, sampling: SamplingParams) -> list[RolloutResult]:
    """Set the texts of the responses. With stop strings, the engine has already set the texts, up to the stop string."""
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
    """Build the record of one answer.

    Args:
        item: prompt and data row.
        prompt_index: index of the prompt in its batch or, in an evaluation, among all prompts.
        sample_index: index of the answer among the prompt's samples.
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
