"""Supervised fine-tuning on prompt and response rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from areno.loss_fns.sft import sft_loss_fn
from areno.text.chat import RenderedPrompt
from areno.text.data_rows import encode_examples, ending_token, render_prompt, response_of, sft_row, text_or_messages
from areno.training.objectives.base import Objective, RowBounds
from areno.types import TrainSequence


def build_sft_rows(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, bounds: RowBounds
) -> tuple[list[TrainSequence], int]:
    """Return a training sequence for each usable row, and the number of dropped rows.

    A row has either ``prompt`` and ``response``, or ``question`` and ``answer``, or ``messages``. Its sequence is the encoded
    prompt and the response. An EOS token is appended to a response that does not end with EOS. Rows with an empty response, and
    rows that are too long, are dropped.

    Raises:
        DataError: a row is malformed, or all rows were dropped.
    """
    source, limit = bounds.source, bounds.context_limit
    texts: list[tuple[RenderedPrompt, str]] = []
    for index in range(len(rows)):
        row = sft_row(rows[index], source, index, bounds.loader)
        prompt = text_or_messages(row, "prompt", source, index, bounds.loader)
        if response := response_of(row, source, index, bounds.loader):
            texts.append((render_prompt(tokenizer, prompt, bounds.disable_thinking, source, index), response))
    sequences: list[TrainSequence] = []
    lengths: list[tuple[int, int]] = []
    for prompt_ids, response_ids in encode_examples(tokenizer, texts, bounds.eos_token_ids):
        lengths.append((len(prompt_ids), len(response_ids)))
        fits = limit is None or len(prompt_ids) + len(response_ids) <= limit
        if fits and len(prompt_ids) <= bounds.max_prompt_tokens and 0 < len(response_ids) <= bounds.max_new_tokens:
            mask = [True] * len(prompt_ids) + [False] * len(response_ids)
            eos = ending_token(tokenizer, bounds.eos_token_ids)
            sequences.append(TrainSequence(mask, prompt_ids + response_ids, eos_token_id=0 if eos is None else eos))
    if not sequences:
        shortest = "every response is empty"
        if lengths:
            prompt_length, response_length = min(lengths, key=sum)
            shortest = f"the shortest row has {prompt_length} prompt and {response_length} response tokens"
        raise bounds.none_left(len(rows), shortest)
    return sequences, len(rows) - len(sequences)


SFT = Objective(
    needs="response",
    build=build_sft_rows,
    loss_fn=sft_loss_fn,
    names={"loss": ("loss", "range"), "ppl": ("ppl", "range")},
    held_out={"target_tokens": "sft_target_tokens"},
)
