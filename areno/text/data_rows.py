"""Convert dataset rows in common formats to the keys that areno expects, and encode the fields of rows.

Error messages name the source and the row number, counted from 1.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areno.errors import DataError, UsageError
from areno.text.chat import RenderedPrompt, encode_rendered, render_generation_prompt
from areno.text.markers import warn_about_markers

_ENCODE_ROWS = 1024
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_ASSISTANT_TURN = "\n\nAssistant:"
LOADER_OPTION = "--dataset-loader-fn"
"""The option of ``areno train`` that sets a dataset loader."""
Messages = list[dict[str, Any]]


def text_or_messages(
    row: Mapping[str, Any], key: str, source: str, index: int, loader: str = LOADER_OPTION
) -> str | Messages:
    """Return the text or the chat messages under a row's key. Null fields, which Arrow adds to messages, are removed.

    Raises DataError if the value is missing, or is neither text nor messages.
    """
    value = row.get(key)
    if value is None:
        raise DataError(
            f"{named_row(source, index)}dataset row must contain `{key}`, but "
            f"{f'`{key}` is null' if key in row else 'its keys are: ' + (', '.join(map(str, row)) or 'none')}. "
            f"Use {loader} to convert rows"
        )
    if isinstance(value, str):
        return value
    # Arrow gives all messages of a column the same keys, with None for missing ones.
    if isinstance(value, list) and value and all(isinstance(message, Mapping) for message in value):
        messages = [{name: part for name, part in message.items() if part is not None} for message in value]
        if all(isinstance(message.get("role"), str) and len(message) > 1 for message in messages):
            return messages
    raise DataError(
        f"{named_row(source, index)}`{key}` must be text or a list of messages with role and content, got {value!r:.80}"
    )


def response_of(row: Mapping[str, Any], source: str, index: int, loader: str) -> str:
    """Return the response text of a row; empty if the response is null. Callers drop rows with an empty response.

    Raises DataError if the row has no ``response``, or if the response is not text.
    """
    if "response" not in row:
        raise DataError(
            f"{named_row(source, index)}dataset row must contain `response`, but its keys are: {', '.join(map(str, row))}. "
            f"Use {loader} to convert rows"
        )
    response = row["response"]
    if response is not None and not isinstance(response, str):
        raise DataError(f"{named_row(source, index)}`response` must be text, got {response!r:.80}")
    return response or ""


def answer_of(row: Mapping[str, Any], key: str, source: str, index: int, loader: str) -> str | Messages:
    """Return the result of :func:`text_or_messages`. In addition, allow an empty list as the value of ``key``."""
    return [] if row.get(key) == [] else text_or_messages(row, key, source, index, loader)


def render_prompt(tokenizer: Any, prompt: Any, disable_thinking: bool, source: str, index: int) -> RenderedPrompt:
    """Render the prompt of a row. Raises DataError if the template rejects the prompt.

    Logs a warning, at most once per tokenizer, if the prompt already contains chat template markers, or if the tokenizer has
    no chat template.
    """
    warn_about_markers(tokenizer, prompt, named_row(source, index).removesuffix(": "))
    try:
        return render_generation_prompt(tokenizer, prompt, disable_thinking)
    except UsageError as error:
        raise DataError(f"{named_row(source, index)}{error}") from error


def encode_examples(
    tokenizer: Any, examples: Sequence[tuple[RenderedPrompt, str]], eos_token_ids: frozenset[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Encode prompts and responses to token ids. An EOS token is appended to each response that does not end with EOS."""
    eos = ending_token(tokenizer, eos_token_ids)
    for begin in range(0, len(examples), _ENCODE_ROWS):
        prompts, responses = zip(*examples[begin : begin + _ENCODE_ROWS], strict=True)
        encoded = tokenizer(list(responses), add_special_tokens=False)["input_ids"]
        for prompt_ids, response_ids in zip(encode_rendered(tokenizer, prompts), encoded, strict=True):
            if eos is not None and not (eos_token_ids | {eos}).intersection(response_ids[-1:]):
                response_ids.append(eos)
            yield prompt_ids, response_ids


def ending_token(tokenizer: Any, eos_token_ids: frozenset[int]) -> int | None:
    """Return the tokenizer's EOS id, or else the lowest of ``eos_token_ids``; None if there is no EOS id."""
    eos = tokenizer.eos_token_id
    return eos if eos is not None else min(eos_token_ids, default=None)


def named_row(source: str, index: int | None = None) -> str:
    """Return the prefix ``source, row N: `` of a message. N is ``index`` plus 1."""
    row = "" if index is None else f"row {index + 1}"
    name = ", ".join(part for part in (source, row) if part)
    return f"{name}: " if name else ""


PROMPT_FIELDS = ("messages", "prompt", "question")
"""Fields that may contain the prompt of a row for RL. The first field that is not empty is used."""


def sft_row(row: Mapping[str, Any], source: str, index: int, loader: str) -> Mapping[str, Any]:
    """Convert a row to the keys ``prompt`` and ``response``.

    If the last of ``messages`` is from the assistant, the last message becomes the response, and all earlier messages
    become the prompt. ``question`` becomes the prompt, and ``answer`` becomes the response. Rows that already have
    ``prompt`` or ``response``, and rows in other formats, are returned unchanged. Raises DataError if the last message
    calls tools, because a response is text.
    """
    if "prompt" in row or "response" in row:
        return row
    messages = row.get("messages")
    if isinstance(messages, list) and len(messages) > 1:
        *prompt, last = messages
        if isinstance(last, Mapping) and last.get("role") == "assistant":
            if last.get("tool_calls"):
                raise DataError(
                    f"{named_row(source, index)}the last of `messages` has `tool_calls`, but a response must be text. "
                    f"In a dataset loader ({loader}), remove the row, or put the calls into `response` as text in the "
                    "model's format"
                )
            return {**row, "prompt": prompt, "response": last.get("content")}
    if row.get("question") is not None and "answer" in row:
        return {**row, "prompt": row["question"], "response": row["answer"]}
    return row


def pair_row(row: Mapping[str, Any], *, with_template: bool) -> Mapping[str, Any]:
    """Convert the transcripts of an hh-rlhf preference pair to conversations.

    Each turn of a transcript starts with ``\\n\\nHuman:`` or ``\\n\\nAssistant:``. A transcript that does not end with
    a response becomes an empty list, and the pair is dropped later. Rows that are not such pairs, and pairs that
    already have a ``prompt``, are returned unchanged.

    Set ``with_template`` to False if the tokenizer has no chat template. The pair then remains text, and the prompt is
    the common prefix of both transcripts, up to the last ``Assistant:`` in this prefix.
    """
    texts = [row.get(key) for key in ("chosen", "rejected")]
    if row.get("prompt") is not None or not all(isinstance(text, str) and _TURN.match(text) for text in texts):
        return row
    chosen, rejected = (str(text) for text in texts)
    conversations = {"chosen": _messages(chosen), "rejected": _messages(rejected)}
    if with_template or not all(conversations.values()):
        return {**row, **conversations}
    differs = next((at for at, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other), None)
    cut = chosen.rfind(_ASSISTANT_TURN, 0, differs)
    if cut < 0:
        return {**row, "chosen": [], "rejected": []}  # not two responses to one prompt
    cut += len(_ASSISTANT_TURN)
    return {**row, "prompt": chosen[:cut], "chosen": chosen[cut:], "rejected": rejected[cut:]}


def _messages(transcript: str) -> list[dict[str, str]]:
    """Parse a transcript, and merge consecutive turns of the same role; [] if the transcript does not end with a response."""
    _, *parts = _TURN.split(transcript)
    messages: list[dict[str, str]] = []
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        if messages and messages[-1]["role"] == _ROLES[name]:
            messages[-1]["content"] += "\n\n" + text.strip()
        else:
            messages.append({"role": _ROLES[name], "content": text.strip()})
    return messages if messages[-1]["role"] == "assistant" and messages[-1]["content"] else []
