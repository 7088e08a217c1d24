"""Preference data: a row with a chosen and a rejected answer becomes two adjacent training sequences.

A row has the keys ``prompt``, ``chosen`` and ``rejected``. The answers are two texts or two message lists. A message list that
begins with an assistant turn continues the prompt. Any other message list is a complete conversation, which needs no
``prompt``. :mod:`areno.text.data_rows` converts transcripts in the format of hh-rlhf.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from areno.errors import DataError
from areno.loss_fns.dpo import dpo_loss_fn
from areno.loss_fns.reward_model import reward_model_loss_fn
from areno.text.chat import RenderedPrompt
from areno.text.data_rows import (
    Messages,
    answer_of,
    encode_examples,
    ending_token,
    named_row,
    pair_row,
    render_prompt,
    text_or_messages,
)
from areno.training.objectives.base import Objective, RowBounds
from areno.types import TrainSequence

Pair = tuple[TrainSequence, TrainSequence]
Tokens = tuple[list[int], list[int]]


def build_preference_rows(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, bounds: RowBounds
) -> tuple[list[Pair], int]:
    """Tokenize preference rows into pairs (chosen, rejected). Also return the number of dropped rows.

    The attribute ``group`` of both sequences of a pair is the index of the pair.

    If an answer is text, its sequence is the encoded prompt and the answer. An EOS token is appended to an answer that does not
    end with EOS. Conversations are rendered by the chat template. The common token prefix of the two conversations is context,
    and the remaining tokens are trained on.

    A pair is dropped if it has an empty answer, two equal answers, or a sequence that exceeds the limit. The limit is the sum
    of the prompt limit and the answer limit, but at most the context limit.

    Raises:
        DataError: a row is malformed, or all rows were dropped.
    """
    source, loader, eos = bounds.source, bounds.loader, bounds.eos_token_ids
    texts: list[tuple[RenderedPrompt, str]] = []
    conversations: list[tuple[Tokens, Tokens] | None] = []
    for index in range(len(rows)):
        row = pair_row(rows[index], with_template=bool(tokenizer.chat_template))
        chosen, rejected = (answer_of(row, key, source, index, loader) for key in ("chosen", "rejected"))
        if not chosen or not rejected:
            continue
        if isinstance(chosen, str) and isinstance(rejected, str):
            prompt = text_or_messages(row, "prompt", source, index, loader)
            rendered = render_prompt(tokenizer, prompt, bounds.disable_thinking, source, index)
            texts += [(rendered, chosen), (rendered, rejected)]
            conversations.append(None)
        else:
            conversations.append(_conversations(row, chosen, rejected, tokenizer, source, index))
    encoded = encode_examples(tokenizer, texts, eos)
    candidates = [tokens or (next(encoded), next(encoded)) for tokens in conversations]
    longest = min(bounds.max_prompt_tokens + bounds.max_new_tokens, bounds.context_limit or sys.maxsize)
    pairs = list(_usable(candidates, longest, ending_token(tokenizer, eos) or 0))
    if not pairs:
        raise bounds.none_left(
            len(rows),
            _shortest(candidates),
            " (the sum of both options limits the length of prompt and answer together)",
        )
    return pairs, len(rows) - len(pairs)


def _conversations(
    row: Mapping[str, Any], chosen: str | Messages, rejected: str | Messages, tokenizer: Any, source: str, index: int
) -> tuple[Tokens, Tokens]:
    """Return the (context, answer) tokens of the chosen and of the rejected conversation."""
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise DataError(
            f"{named_row(source, index)}`chosen` and `rejected` must be two texts or two lists of messages, got "
            f"{type(chosen).__name__} and {type(rejected).__name__}"
        )
    chats = [
        _full_conversation(row, messages, key, source, index)
        for key, messages in (("chosen", chosen), ("rejected", rejected))
    ]
    first, second = (_encode_chat(tokenizer, chat, source, index) for chat in chats)
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    return (first[:shared], first[shared:]), (second[:shared], second[shared:])


def _full_conversation(row: Mapping[str, Any], messages: Messages, key: str, source: str, index: int) -> Messages:
    """Prepend the prompt to a conversation that begins with an assistant turn."""
    if messages[0]["role"] != "assistant":
        return messages
    if row.get("prompt") is None:
        raise DataError(
            f"{named_row(source, index)}`{key}` begins with an assistant message, but the row has no `prompt`; "
            "add a prompt, or give the complete conversation"
        )
    prompt = text_or_messages(row, "prompt", source, index)
    return [*([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt), *messages]


def _encode_chat(tokenizer: Any, messages: Messages, source: str, index: int) -> list[int]:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise DataError(
            f"{named_row(source, index)}`chosen` and `rejected` are lists of messages, but the tokenizer has no chat "
            "template; use texts, or a model with a chat template"
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"{named_row(source, index)}the chat template rejects messages with the roles {roles}: {error}"
        ) from error
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _usable(candidates: Sequence[tuple[Tokens, Tokens]], longest: int, eos: int) -> Iterator[Pair]:
    """Yield the training rows of each pair that fits the limit and has different, non-empty answers."""
    group = 0
    for tokens in candidates:
        fits = all(len(context) + len(answer) <= longest for context, answer in tokens)
        if not fits or tokens[0] == tokens[1]:
            continue
        if not all(answer and len(context) + len(answer) > 1 for context, answer in tokens):
            continue  # nothing to train on: the first token of a sequence is not predicted
        chosen, rejected = (
            TrainSequence(
                [True] * len(context) + [False] * len(answer), context + answer, eos_token_id=eos, group=group
            )
            for context, answer in tokens
        )
        yield chosen, rejected
        group += 1


def _shortest(candidates: Sequence[tuple[Tokens, Tokens]]) -> str:
    if not candidates:
        return "every pair has an empty answer"
    lengths = [[len(context) + len(answer) for context, answer in tokens] for tokens in candidates]
    chosen, rejected = min(lengths, key=max)
    return (
        f"in the shortest pair, the chosen sequence has {chosen} tokens and the rejected sequence has {rejected} tokens. "
        "Pairs are dropped if a sequence is too long, an answer is empty, or both answers are equal"
    )


PAIR_STATISTICS = ("pair_accuracy", "pair_reward_margin", "pair_chosen_reward", "pair_rejected_reward")
DPO = Objective(
    needs="pair",
    build=build_preference_rows,
    loss_fn=dpo_loss_fn,
    names={
        "reward_accuracy": ("accuracy", "range"),
        **{name: (name, "range") for name in ("loss", "reward_margin", "chosen_reward", "rejected_reward")},
    },
    held_out={name: f"dpo_{name}" for name in ("accuracy", "margin", "chosen_reward", "rejected_reward")},
    sequences=2,
)
PAIRS = replace(DPO, held_out={name.removeprefix("pair_"): name for name in PAIR_STATISTICS})
"""The objective for preference pairs with a loss function from the user.

This loss function may report the statistics in ``PAIR_STATISTICS``.
"""
REWARD_MODEL = Objective(
    needs="pair",
    build=build_preference_rows,
    loss_fn=reward_model_loss_fn,
    names={
        "loss": ("loss", "range"),
        "correct_ratio": ("accuracy", "range"),
        "pos_score": ("chosen_score", "range"),
        "neg_score": ("rejected_score", "range"),
        "n_pairs": ("loss", "count"),
    },
    held_out={name: f"rm_{name}" for name in ("accuracy", "margin", "chosen_score", "rejected_score")},
    sequences=2,
)
