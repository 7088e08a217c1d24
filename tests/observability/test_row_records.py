"""What ``samples.jsonl`` records about a batch: the prompt of each answer, and which tokens were trained on."""

from __future__ import annotations

from areno.observability.samples import row_records, row_segments
from areno.serving.token_text import TokenTexts
from areno.types import TrainSequence
from tests.support.tiny import TEXTS, bpe_tokenizer


def test_samples_are_numbered_within_their_group_and_averaged_over_trained_tokens():
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
    data = [{"question": "?", "answer": "3"}, {"question": "!", "answer": "4"}]
    records = row_records(3, [7, 5], rows, tokenizer, TokenTexts(tokenizer), {}, data)
    assert [one["data"] for one in records] == [{"answer": "3"}, {"answer": "3"}, {"answer": "4"}, {"answer": "4"}]
    assert [(one["prompt_index"], one["sample_index"], one["reward"]) for one in records] == [
        (7, 0, 0.0), (7, 1, 1.0), (5, 0, 2.0), (5, 1, 3.0),
    ]  # fmt: skip
    assert [one["finish_reason"] for one in records] == ["stop", "stop", "length", "stop"]
    assert [[len(segment["tokens"]) for segment in one["rows"][0]] for one in records] == [
        [len(prompt), 1, len(answer) - 1]
    ] * 4
    for one in records:
        assert (one["step"], one["advantage"], one["logprob_mean"]) == (3, 2.0, -1.0)
        assert (one["prompt"], one["completion"]) == ("What is 1 plus 2?", "The answer is 3.")


def test_a_row_is_recorded_token_by_token_and_turn_by_turn():
    tokenizer = bpe_tokenizer(TEXTS)
    row = TrainSequence(
        tokens=[5, 6, 7, 8, 9, 10],
        prompt_mask=[True, True, False, True, False, False],
        logprobs=[0.0, 0.0, -1.0, 0.0, -2.0, -3.0],
        versions=[-1, -1, 4, -1, 5, 5],
        loss_mask=[False, False, True, False, True, False],
        advantages=[0.0, 0.0, 0.5, 0.0, 0.5, 0.5],
    )
    segments = row_segments(row, TokenTexts(tokenizer))
    assert [(one["role"], one["turn"], one["trained"], one["version"], one["tokens"]) for one in segments] == [
        ("given", 0, False, -1, [5, 6]),
        ("text", 0, True, 4, [7]),
        ("given", 1, False, -1, [8]),
        ("text", 1, True, 5, [9]),
        ("text", 1, False, 5, [10]),
    ]
    assert [one["logprobs"] for one in segments] == [[0.0, 0.0], [-1.0], [0.0], [-2.0], [-3.0]]
    assert segments[1]["texts"] == [tokenizer.decode([7])]
