"""Loads datasets from a path or the Hugging Face Hub, and encodes their prompts.

:mod:`areno.api.dataset_files` reads local files. A reference that looks like a path is never looked up on the Hub.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areno.api.dataset_files import read_file, read_folder
from areno.config.paths import looks_like_path
from areno.config.splits import TRAIN
from areno.errors import ArenoError, UsageError, first_line
from areno.rewards.worker import describe_error, source_file
from areno.text.chat import encode_rendered
from areno.text.data_rows import named_row, render_prompt, text_or_messages
from areno.types import PromptBatch, PromptItem

if TYPE_CHECKING:
    from datasets import Dataset


def load_rows(dataset_path: str, *, option: str = "--dataset-path", split: str = TRAIN) -> Dataset:
    """Load rows from a data file, a folder, or the Hugging Face Hub.

    Args:
        dataset_path: path of a file, of a folder of files, or of a folder that ``save_to_disk`` wrote; or a hub
            reference ``repo[:config[:split]]``. Files are JSON, JSONL, Parquet, CSV, TSV or Arrow.
        option: name of the option that sets ``dataset_path``, for error messages.
        split: split to read from a folder with splits, or from a hub reference that names no split.

    Raises:
        DataError: a file is malformed.
        UsageError: ``dataset_path`` does not exist or cannot be loaded.
    """
    path = Path(dataset_path).expanduser()
    if path.is_dir():
        return read_folder(path, option, split)
    if path.is_file():
        return read_file(path, option)
    if _can_only_be_a_path(dataset_path):
        raise UsageError(
            f"{option} {dataset_path}: there is no such file or folder ({path.absolute()}); correct the path, or "
            "write a hub dataset as `owner/name`, `owner/name:config` or `owner/name:config:split`"
        )
    parts = dataset_path.split(":")
    if len(parts) > 3 or not all(parts):
        raise UsageError(
            f"{option} {dataset_path}: the hub reference is malformed; write repo, repo:config or repo:config:split"
        )
    name, config, explicit_split = (*parts, None, None)[:3]
    return _load_from_hub(f"{option} {dataset_path}", str(name), config, explicit_split or split)


def load_training_dataset(
    dataset_path: str,
    loader_fn: Callable[..., Any] | None = None,
    *,
    option: str = "--dataset-path",
    loader_option: str = "--dataset-loader-fn",
    split: str = TRAIN,
) -> Sequence[Mapping[str, Any]]:
    """Load the training or evaluation rows of a run. Only the first row is checked.

    If ``loader_fn`` is set, ``loader_fn`` loads the rows and may interpret ``dataset_path`` in any way. It also gets three
    functions that it can call: ``default_loader`` (:func:`load_rows` for this split), ``load_dataset`` and ``load_from_disk``.

    Raises:
        DataError: a file is malformed.
        UsageError: the loader failed, there are no rows, the first row is not a mapping, or the rows do not support
            ``len()`` and integer indices.
    """
    default_loader = partial(load_rows, option=option, split=split)
    rows: Any = (
        default_loader(dataset_path)
        if loader_fn is None
        else _call_loader(dataset_path, loader_fn, default_loader, loader_option)
    )
    origin = f"{option} {dataset_path}" if loader_fn is None else loader_option
    first = first_row(rows, origin, dataset_path)
    if not isinstance(first, Mapping):
        raise UsageError(
            f"{origin}: row 1 is of type {type(first).__name__}; every row must be a mapping of keys to values"
        )
    checked: Sequence[Mapping[str, Any]] = rows
    return checked


def first_row(rows: Any, origin: str, dataset_path: str) -> Any:
    """Return the first row.

    Raises UsageError if there are no rows, or if the rows do not support ``len()`` and integer indices. The message
    begins with ``origin``.
    """
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise UsageError(
            f"{origin}: the rows must support len() and rows[i], as a list does; got {type(rows).__name__}"
        )
    if len(rows) == 0:
        raise UsageError(f"{origin}: there are no rows in {dataset_path}")
    try:
        return rows[0]
    except (KeyError, TypeError, IndexError) as error:
        splits = f"; choose one of its splits: {', '.join(map(str, rows))}" if isinstance(rows, Mapping) else ""
        raise UsageError(
            f"{origin}: the rows must support rows[i], but rows[0] of {type(rows).__name__} raises an error{splits}"
        ) from error


def first_rows(rows: Sequence[Any], limit: int | None) -> Sequence[Any]:
    """Return the first ``limit`` rows, or all rows if ``limit`` is None."""
    return rows if limit is None or limit >= len(rows) else [rows[index] for index in range(limit)]


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
    """Encode the prompts of rows, and yield the prompts in batches.

    Rows whose prompts are too long are skipped and counted. The last batch may be smaller; no batch is empty.

    The field ``scanned`` of a batch counts the rows in the batch and the skipped rows between them. It also counts the
    skipped rows after the last row of the batch, up to the first row of the next batch. Skipped rows at the very beginning
    count for the first batch. To resume after a batch, increase ``start`` by the sum of ``scanned`` over this batch
    and all earlier batches of the same call.

    Args:
        batch_size: number of rows per batch, without skipped rows.
        max_prompt_tokens: maximum number of tokens of a prompt, including the tokens of the chat template.
        context_limit: maximum number of tokens of prompt and answer together. A prompt that leaves no room for an
            answer is skipped.
        prompt_key: key of a row's prompt, which is a string or a list of chat messages.
        solutions_key: key of a row's reference answer. Rows may lack this key.
        order: indices of the rows in the order in which the rows are read; None means the order of ``rows``.
        start: number of entries of ``order`` to leave out at the beginning.
        source: name of the data in error messages.

    Raises:
        DataError: a row has no usable prompt.
        UsageError: ``start`` is 0, and all prompts are too long.
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
            f"{named_row(source)}all {scanned} prompts are longer than {bound}; the shortest prompt has {shortest} tokens"
        )


def prompt_limit(max_prompt_tokens: int, context_limit: int | None) -> tuple[int, str]:
    """Return the maximum number of tokens of a prompt, and a description of this maximum.

    If ``context_limit`` is set, a prompt must leave room for at least one token of the answer.
    """
    if context_limit is None or context_limit > max_prompt_tokens:
        return max_prompt_tokens, f"--max-prompt-tokens {max_prompt_tokens}"
    return context_limit - 1, (
        f"{context_limit - 1} tokens (longer prompts leave no room for an answer in a context of {context_limit} tokens, "
        "which the model or --max-context-len sets)"
    )


def _can_only_be_a_path(reference: str) -> bool:
    folder, slash, _ = reference.partition("/")
    # If the folder `data` exists, `data/name` is a path; `data/name:config` can only be a hub reference.
    in_folder = bool(slash) and ":" not in reference and Path(folder).is_dir()
    return in_folder or looks_like_path(reference)


def _load_from_hub(label: str, name: str, config: str | None, split: str) -> Dataset:
    from datasets import load_dataset

    try:
        try:
            return load_dataset(name, config, split=split)
        except ValueError as error:
            if config is not None or "Config name is missing" not in str(error) or "'main'" not in str(error):
                raise
            return load_dataset(name, "main", split=split)
    except Exception as error:  # network, hub and builders fail in many ways
        raise UsageError(
            f"{label}: the dataset {name} could not be loaded from the hub: {first_line(error)}\n"
            "Check the name, configuration and split (repo:config:split) and the network (HF_HUB_OFFLINE must be unset "
            "for a first download; a private dataset needs `hf auth login`), or pass a local file."
        ) from error


def _call_loader(
    dataset_path: str, loader_fn: Callable[..., Any], default_loader: Callable[..., Any], option: str
) -> Any:
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
            f"{option}: the loader failed on {dataset_path}: {describe_error(error, source_file(loader_fn))}"
        ) from error
