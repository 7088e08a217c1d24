"""Supervised fine-tuning on prompt and response rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areno.errors import DataError
from areno.loss_fns.sft import sft_loss_fn
from areno.text.chat import RenderedPrompt
from areno.text.data_rows import (
    LOADER_OPTION,
    encode_examples,
    ending_token,
    flags_of,
    named_row,
    render_prompt,
    response_of,
    text_or_messages,
    within,
)
from areno.text.row_formats import sft_row
from areno.training.objectives.base import Objective
from areno.types import TrainSequence


def build_sft_rows(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    max_prompt_tokens: int,
    max_new_tokens: int,
    eos_token_ids: frozenset[int],
    context_limit: int | None = None,
    source: str = "",
    disable_thinking: bool = False,
    loader: str = LOADER_OPTION,
    limits: str = "",
) -> tuple[list[TrainSequence], int]:
    """Tokenize rows for supervised training: ``prompt`` and ``response``, ``question`` and ``answer``, or ``messages``.

    A sequence is the encoded prompt, the response and an EOS token (unless the response ends with one). Rows without a
    response, and rows that are too long, are dropped.

    Args:
        rows: anything with ``len()`` and integer indexing.
        tokenizer: a ``transformers`` tokenizer.
        max_prompt_tokens: longest accepted prompt, in tokens.
        max_new_tokens: longest accepted response, in tokens, EOS included.
        eos_token_ids: ids that end a response; the tokenizer's own one, if any, is appended.
        context_limit: most tokens of prompt and response together.
        source: what error messages call the data.
        disable_thinking: see :func:`areno.text.chat.render_generation_prompt`.
        loader: setting that names a loader, for error messages.
        limits: settings that bound a row, for error messages; empty names the options of ``areno train``.

    Returns:
        The sequences in row order, and how many rows were dropped.

    Raises:
        DataError: a row has no usable ``prompt`` or ``response`` key, or every row was dropped.
    """
    kept: list[tuple[RenderedPrompt, str]] = []
    for index in range(len(rows)):
        row = sft_row(rows[index])
        prompt = text_or_messages(row, "prompt", source, index, loader)
        if response := response_of(row, source, index, loader):
            kept.append((render_prompt(tokenizer, prompt, disable_thinking, source, index), response))
    sequences: list[TrainSequence] = []
    lengths: list[tuple[int, int]] = []
    for prompt_ids, response_ids in encode_examples(tokenizer, kept, eos_token_ids):
        lengths.append((len(prompt_ids), len(response_ids)))
        fits = context_limit is None or len(prompt_ids) + len(response_ids) <= context_limit
        if fits and len(prompt_ids) <= max_prompt_tokens and 0 < len(response_ids) <= max_new_tokens:
            mask = [True] * len(prompt_ids) + [False] * len(response_ids)
            eos = ending_token(tokenizer, eos_token_ids)
            sequences.append(TrainSequence(mask, prompt_ids + response_ids, eos_token_id=0 if eos is None else eos))
    if not sequences:
        shortest = "every response is empty"
        if lengths:
            prompt_length, response_length = min(lengths, key=sum)
            shortest = f"the shortest row has {prompt_length} prompt and {response_length} response tokens"
        raise DataError(
            f"{named_row(source)}none of {len(rows)} rows can be used with "
            f"{limits or flags_of(max_prompt_tokens, max_new_tokens) + within(context_limit)}: {shortest}"
        )
    return sequences, len(rows) - len(sequences)


SFT = Objective(
    needs="response",
    build=build_sft_rows,
    loss_fn=sft_loss_fn,
    names={"loss": ("loss", "range"), "ppl": ("ppl", "range")},
    held_out={"target_tokens": "sft_target_tokens"},
)
