"""Data sets for training: from a path or a hub reference to rows, and from rows to prompts or training sequences.

Local data goes through :mod:`areno.api.dataset_files`; what looks like a path is never looked up on the hub. Every
complaint about a row names the source, the row number (from 1) and the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areno.api.dataset_files import read_file, read_folder
from areno.api.row_formats import sft_row
from areno.config.paths import looks_like_path
from areno.config.splits import TRAIN
from areno.errors import ArenoError, DataError, UsageError
from areno.rewards.worker import describe_error, source_file
from areno.text.chat import RenderedPrompt, encode_rendered, render_generation_prompt
from areno.text.markers import warn_of_markers
from areno.types import PromptBatch, PromptItem, TrainSequence

if TYPE_CHECKING:
    from datasets import Dataset

_ENCODE_ROWS = 1024
LOADER_OPTION = "--dataset-loader-fn"
"""The option of ``areno train`` that names a loader."""


def load_rows(dataset_path: str, *, option: str = "--dataset-path", split: str = TRAIN) -> Dataset:
    """Load rows from a data file, a folder, or a hub reference ``repo[:config[:split]]``.

    Args:
        dataset_path: JSON, JSONL, Parquet, CSV, TSV or Arrow file; a folder of such files or of ``save_to_disk``; or a
            hub reference.
        option: flag that named it, for error messages.
        split: of a folder that has some, and of a hub reference that names none itself.

    Raises:
        DataError: a file is malformed.
        UsageError: there is nothing usable at ``dataset_path``.
    """
    path = Path(dataset_path).expanduser()
    if path.is_dir():
        return read_folder(path, option, split)
    if path.is_file():
        return read_file(path, option)
    if _can_only_be_a_path(dataset_path):
        raise UsageError(
            f"{option} {dataset_path}: no such file or folder (looked at {path.absolute()}); "
            "a hub data set is named `owner/name`, `owner/name:config` or `owner/name:config:split`"
        )
    parts = dataset_path.split(":")
    if len(parts) > 3 or not all(parts):
        raise UsageError(
            f"{option} {dataset_path}: a hub reference has the form repo, repo:config or repo:config:split"
        )
    name, config, own = (*parts, None, None)[:3]
    return _load_from_hub(f"{option} {dataset_path}", str(name), config, own or split)


def load_training_dataset(
    dataset_path: str,
    loader_fn: Callable[..., Any] | None = None,
    *,
    option: str = "--dataset-path",
    split: str = TRAIN,
) -> Sequence[Mapping[str, Any]]:
    """Load the rows that a trainer reads, through the user's loader if there is one.

    Args:
        dataset_path: as in :func:`load_rows`; a loader may give it a meaning of its own.
        loader_fn: called with the path and the keywords ``default_loader``, ``load_dataset`` and ``load_from_disk``.
        option: flag that named the path, for error messages.
        split: as in :func:`load_rows`; a loader gets it with ``default_loader``.

    Returns:
        A list or ``datasets.Dataset`` of mappings, at least one.

    Raises:
        DataError: a file is malformed.
        UsageError: the loader failed, or gave something without ``len()`` and integer indexing, or no rows.
    """
    default_loader = partial(load_rows, option=option, split=split)
    rows = default_loader(dataset_path) if loader_fn is None else _call_loader(dataset_path, loader_fn, default_loader)
    origin = f"{option} {dataset_path}" if loader_fn is None else "--dataset-loader-fn"
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise UsageError(f"{origin}: got {type(rows).__name__}; it must support len() and rows[i], for example a list")
    if len(rows) == 0:
        raise UsageError(f"{origin}: no rows in {dataset_path}")
    try:
        first = rows[0]
    except (KeyError, TypeError, IndexError) as error:
        splits = f"; choose one of {', '.join(map(str, rows))}" if isinstance(rows, Mapping) else ""
        raise UsageError(f"{origin}: {type(rows).__name__} has no row 0{splits}; it must support rows[i]") from error
    if not isinstance(first, Mapping):
        raise UsageError(f"{origin}: row 1 is {type(first).__name__}; every row must be a mapping of keys to values")
    return rows


def iter_prompt_batches(
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    batch_size: int,
    max_prompt_tokens: int,
    context_limit: int | None = None,
    prompt_key: str = "prompt",
    solutions_key: str = "solutions",
    order: Sequence[int] | None = None,
    start: int = 0,
    disable_thinking: bool = False,
    source: str = "",
) -> Iterator[PromptBatch]:
    """Walk over rows and yield batches of encoded prompts.

    Rows whose prompt is too long are skipped and counted. The last batch may be smaller, none is empty. The position to
    resume at is ``start`` plus the ``scanned`` of all batches so far; skipped rows behind a batch belong to it, so the
    sum reaches the end of ``order`` with the last batch.

    Args:
        rows: anything with ``len()`` and integer indexing.
        tokenizer: a ``transformers`` tokenizer.
        batch_size: accepted rows per batch.
        max_prompt_tokens: longest accepted prompt, in tokens, template included.
        context_limit: most tokens of prompt and answer; a prompt that leaves no room for an answer is too long.
        prompt_key: key of the prompt, a text or a list of chat messages.
        solutions_key: key of the reference answer; may be absent.
        order: row indices in visiting order; None is the order of the file.
        start: position in ``order`` to begin at.
        disable_thinking: see :func:`areno.text.chat.render_generation_prompt`.
        source: what error messages call the data.

    Raises:
        DataError: a row has no usable prompt.
        UsageError: from position 0 on, every prompt is too long.
    """
    order = range(len(rows)) if order is None else order
    longest, bound = prompt_limit(max_prompt_tokens, context_limit)
    batch = PromptBatch([])
    scanned = skipped = 0
    shortest: int | None = None
    for index in order[start:]:
        row = dict(rows[index])
        prompt = text_or_messages(row, prompt_key, source, index)
        rendered = render_prompt(tokenizer, prompt, disable_thinking, source, index)
        tokens = encode_rendered(tokenizer, [rendered])[0]
        shortest = len(tokens) if shortest is None else min(shortest, len(tokens))
        fits = len(tokens) <= longest
        if fits and len(batch.items) == batch_size:
            yield batch
            batch = PromptBatch([], total_skipped_long=skipped)
        scanned += 1
        batch.scanned += 1
        if fits:
            text = prompt if isinstance(prompt, str) else rendered.text
            batch.items.append(PromptItem(text, row.get(solutions_key), tokens, row))
        else:
            skipped += 1
            batch.skipped_long += 1
            batch.total_skipped_long = skipped
    if batch.items:
        yield batch
    elif scanned and start == 0:
        raise UsageError(
            f"{named_row(source)}all {scanned} prompts are longer than {bound}; the shortest has {shortest} tokens"
        )


def prompt_limit(max_prompt_tokens: int, context_limit: int | None) -> tuple[int, str]:
    """Tokens of the longest prompt that leaves room for an answer, and what says so."""
    if context_limit is None or context_limit > max_prompt_tokens:
        return max_prompt_tokens, f"--max-prompt-tokens {max_prompt_tokens}"
    return context_limit - 1, (
        f"{context_limit - 1} tokens, which leave room for an answer in a context of {context_limit} (the model's limit, "
        "or --max-context-len)"
    )


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


def flags_of(max_prompt_tokens: int, max_new_tokens: int) -> str:
    """Names the bounds of ``areno train`` in an error message."""
    return f"--max-prompt-tokens {max_prompt_tokens} and --max-new-tokens {max_new_tokens}"


def within(context_limit: int | None) -> str:
    """Names a bound in an error message."""
    return (
        "" if context_limit is None else f" in a context of {context_limit} tokens (the model's, or --max-context-len)"
    )


def text_or_messages(
    row: Mapping[str, Any], key: str, source: str, index: int, loader: str = LOADER_OPTION
) -> str | list[dict[str, Any]]:
    """The text or the chat messages under a key of a row; messages without the keys that Arrow filled with None.

    Raises:
        DataError: there is no such key, or another type of value; the message names source, row and key.
    """
    value = row.get(key)
    if value is None:
        raise DataError(
            f"{named_row(source, index)}dataset row must contain `{key}`; it "
            f"{'is null' if key in row else 'has ' + (', '.join(map(str, row)) or 'no keys')}. "
            f"Use {loader} to bring rows into shape"
        )
    if isinstance(value, str):
        return value
    # Arrow gives all messages of a column the same keys; those that a message did not have are None.
    if isinstance(value, list) and value and all(isinstance(message, Mapping) for message in value):
        messages = [{name: part for name, part in message.items() if part is not None} for message in value]
        if all(isinstance(message.get("role"), str) and len(message) > 1 for message in messages):
            return messages
    raise DataError(
        f"{named_row(source, index)}`{key}` must be a text or a list of messages with role and content, got {value!r:.80}"
    )


def render_prompt(tokenizer: Any, prompt: Any, disable_thinking: bool, source: str, index: int) -> RenderedPrompt:
    """:func:`~areno.text.chat.render_generation_prompt` for a row of a data set; warns of markers that it has already.

    Raises:
        DataError: the chat template refuses the prompt; the message names source and row.
    """
    warn_of_markers(tokenizer, prompt, named_row(source, index).removesuffix(": "))
    try:
        return render_generation_prompt(tokenizer, prompt, disable_thinking)
    except UsageError as error:
        raise DataError(f"{named_row(source, index)}{error}") from error


def encode_examples(
    tokenizer: Any, examples: Sequence[tuple[RenderedPrompt, str]], eos_token_ids: frozenset[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Token ids of prompts and of their responses, each response with an EOS token unless it ends with one.

    Args:
        tokenizer: a ``transformers`` tokenizer.
        examples: rendered prompt and response text.
        eos_token_ids: ids that end a response.
    """
    eos = ending_token(tokenizer, eos_token_ids)
    for begin in range(0, len(examples), _ENCODE_ROWS):
        prompts, responses = zip(*examples[begin : begin + _ENCODE_ROWS], strict=True)
        encoded = tokenizer(list(responses), add_special_tokens=False)["input_ids"]
        for prompt_ids, response_ids in zip(encode_rendered(tokenizer, prompts), encoded, strict=True):
            if eos is not None and not (eos_token_ids | {eos}).intersection(response_ids[-1:]):
                response_ids.append(eos)
            yield prompt_ids, response_ids


def ending_token(tokenizer: Any, eos_token_ids: frozenset[int]) -> int | None:
    """The id that is appended to a response: the tokenizer's EOS, else the least id that ends one; None without any."""
    own = tokenizer.eos_token_id
    return own if own is not None else min(eos_token_ids, default=None)


def named_row(source: str, index: int | None = None) -> str:
    """``source, row N: `` as the beginning of a message; rows count from 1."""
    row = "" if index is None else f"row {index + 1}"
    name = ", ".join(part for part in (source, row) if part)
    return f"{name}: " if name else ""


def _can_only_be_a_path(reference: str) -> bool:
    folder, slash, _ = reference.partition("/")
    # `data/typo` beside an existing folder `data` is a typo; with a `:config` it can only be the hub.
    beside = bool(slash) and ":" not in reference and Path(folder).is_dir()
    return beside or looks_like_path(reference)


def _load_from_hub(given: str, name: str, config: str | None, split: str) -> Dataset:
    from datasets import load_dataset

    try:
        try:
            return load_dataset(name, config, split=split)
        except ValueError as error:
            if config is not None or "Config name is missing" not in str(error) or "'main'" not in str(error):
                raise
            return load_dataset(name, "main", split=split)
    except Exception as error:  # network, hub and builders fail in many ways; the cause stays attached
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"{given}: the data set {name} could not be loaded from the hub: {reason}\n"
            "Check the name, configuration and split (repo:config:split) and the network (HF_HUB_OFFLINE must be unset "
            "for a first download; a private data set needs `hf auth login`), or give a local file."
        ) from error


def _call_loader(dataset_path: str, loader_fn: Callable[..., Any], default_loader: Callable[..., Any]) -> Any:
    from datasets import load_dataset, load_from_disk

    try:
        return loader_fn(
            dataset_path,
            default_loader=default_loader,
            load_dataset=load_dataset,
            load_from_disk=load_from_disk,
        )
    except ArenoError:
        raise
    except Exception as error:
        raise UsageError(
            f"--dataset-loader-fn: the loader failed on {dataset_path}: {describe_error(error, source_file(loader_fn))}"
        ) from error


def response_of(row: Mapping[str, Any], source: str, index: int, loader: str) -> str:
    """The response text; empty where the row is to be dropped."""
    if "response" not in row:
        raise DataError(
            f"{named_row(source, index)}dataset row must contain `response`; it has {', '.join(map(str, row))}. "
            f"Use {loader} to bring rows into shape"
        )
    response = row["response"]
    if response is not None and not isinstance(response, str):
        raise DataError(f"{named_row(source, index)}`response` must be a text, got {response!r:.80}")
    return response or ""


class SkippedPrompts:
    """Counts the prompts that batches have passed over because they are too long."""

    def __init__(self) -> None:
        self._new = self._total = 0

    def counted(self, batches: Iterator[PromptBatch]) -> Iterator[PromptBatch]:
        """The same batches, counted as they are taken."""
        for batch in batches:
            self._new += batch.skipped_long
            self._total += batch.skipped_long
            yield batch

    def take(self) -> dict[str, int]:
        """Those since the last call, and all of them, as :meth:`MetricsRecorder.record_step` takes them."""
        new, self._new = self._new, 0
        return {"skipped_long": new, "total_skipped_long": self._total}
