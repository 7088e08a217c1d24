"""What ``samples.jsonl`` tells of a batch: whose answers these are, and what was trained on."""

from __future__ import annotations

from areno.experiments.trainers.samples import batch_samples
from areno.rollouts.tasks import Batch
from areno.types import TrainSequence
from tests.support.tiny import TEXTS, bpe_tokenizer


def test_samples_are_numbered_within_their_episode_and_told_without_what_is_not_trained_on():
    tokenizer = bpe_tokenizer(TEXTS)
    prompt, answer = (tokenizer.encode(text) for text in ("What is 1 plus 2?", "The answer is 3."))
    rows = [
        TrainSequence(
            tokens=[*prompt, *answer],
            prompt_mask=[True] * len(prompt) + [False] * len(answer),
            logprobs=[0.0] * len(prompt) + [-1.0, *[-3.0] * (len(answer) - 1)],
            loss_mask=[False] * len(prompt) + [True, *[False] * (len(answer) - 1)],
            advantages=[0.0] * len(prompt) + [2.0, *[9.0] * (len(answer) - 1)],
            reward=float(number),
            group=group,
            truncated=number == 2,
        )
        for number, group in enumerate((0, 0, 1, 1))
    ]
    batch = Batch(trajectories=[], task_ids=[7, 5], version=0, staleness=[0, 0])
    told = batch_samples(3, batch, rows, tokenizer)
    assert [(one["prompt_index"], one["sample_index"], one["reward"]) for one in told] == [
        (7, 0, 0.0), (7, 1, 1.0), (5, 0, 2.0), (5, 1, 3.0),
    ]  # fmt: skip
    assert [one["finish_reason"] for one in told] == ["stop", "stop", "length", "stop"]
    for one in told:
        assert (one["step"], one["advantage"], one["logprob_mean"]) == (3, 2.0, -1.0)
        assert (one["prompt"], one["completion"]) == ("What is 1 plus 2?", "The answer is 3.")
