"""Filters and searches recorded samples, and returns pages of samples.

Filters use only the index of the samples. A text search reads a bounded part of the samples file per request.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areno.serving.errors import ApiError, bad_field
from areno.storage.json_lines import MAX_BYTES
from areno.storage.sample_index import FLAGS, Entries, left_out, read_sample
from areno.viewer.catalog import OpenedRun
from areno.viewer.tails import file_size

ORDERS = ("newest", "oldest", "best", "worst", "longest", "shortest")
_SEARCH_BYTES, _SEARCH_S = 64 * 2**20, 1.0
_EXCERPT, _MOST_PARTS = 200, 20
_NEIGHBORS = 256
"""How many index entries before and after a sample's entry are searched for other samples of the same prompt and step.

This number is large enough, because a step records at most 24 samples.
"""


@dataclass(frozen=True, kw_only=True)
class SampleQuery:
    """Selects the samples to list. A filter with the value None is off. Bounds are inclusive. One of ``flags`` suffices."""

    step_from: int | None = None
    step_to: int | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    flags: tuple[str, ...] = ()
    text: str = ""
    order: str = "newest"
    offset: int = 0  # position of the first sample among those that pass the filters, which use only the index
    until: int | None = None  # consider only the first `until` samples, so that pages do not shift
    limit: int = 50


def sample_page(run: OpenedRun, query: SampleQuery) -> dict[str, Any]:
    """Return one page of the samples of a run.

    Returns:
        - ``recorded``: number of all samples
        - ``matching``: number of samples that pass the filters
        - ``until``: only the first ``until`` samples of the run were considered. For the next page, pass this number as
          ``query.until``, so that samples that are recorded in the meantime do not shift the pages.
        - ``samples``: entries as in :func:`describe_entry`, with ``reward_parts`` and ``excerpt``. ``excerpt`` is null if the
          sample's line is damaged or too long.
        - ``next``: offset of the next page; None on the last page. A text search reads only a limited part of the
          samples file for each page, so a page may have no samples although later pages have some.
        - ``left_out``: total size in bytes of the lines that cannot be listed because they are damaged or too long

    Raises:
        ApiError: a flag or the order is unknown.
    """
    every = run.entries()
    until = len(every) if query.until is None else min(query.until, len(every))
    entries = every[:until]
    chosen = _ordered(entries, _filtered(entries, query), query.order)
    samples: list[dict[str, Any]] = []
    following, needle = query.offset, query.text.casefold()
    for position, record in _records(run, entries, chosen, query):
        following = position + 1
        if (excerpt := _excerpt(record, needle)) is not None:
            index = int(chosen[position])
            samples.append({**describe_entry(index, entries[index]), **excerpt})
            if len(samples) == query.limit:
                break
    return {
        "recorded": len(every),
        "left_out": left_out(every, file_size(run.files.samples_path)),
        "matching": len(chosen),
        "until": until,
        "next": following if following < len(chosen) else None,
        "samples": samples,
    }


def read_one(run: OpenedRun, index: int) -> dict[str, Any]:
    """Return the whole ``record`` of a sample, with ``index``, ``recorded`` and ``same_prompt``.

    ``recorded`` is the number of all samples of the run. ``same_prompt`` lists all samples of the same prompt in the same
    step, in the form of :func:`describe_entry`.

    Raises:
        ApiError: there is no such sample, or the sample's line is too long or unreadable.
    """
    entries = run.entries()
    if not 0 <= index < len(entries):
        raise ApiError(
            404,
            f"there is no sample {index}; the run has recorded {len(entries)} samples, numbered from 0",
            code="sample_not_found",
        )
    start = max(index - _NEIGHBORS, 0)
    near, entry = entries[start : index + _NEIGHBORS], entries[index]
    same = np.flatnonzero((near["step"] == entry["step"]) & (near["prompt"] == entry["prompt"])) + start
    if (length := int(entry["length"])) > MAX_BYTES:
        raise ApiError(
            403,
            f"this sample has {length} bytes, which is more than the limit of {MAX_BYTES}; read the sample in "
            f"{run.files.samples_path.name}",
            code="sample_too_large",
        )
    with run.open(run.files.samples_path) as file:
        record = read_sample(file, entry)
    if record is None:
        raise ApiError(404, "the samples were rewritten by a resumed run; reload the page", code="sample_not_found")
    others = [describe_entry(int(place), entries[place]) for place in same]
    return {"index": index, "recorded": len(entries), "same_prompt": others, "record": record}


def describe_entry(index: int, entry: Any) -> dict[str, Any]:
    """Convert a sample's entry in the sample index to JSON data. ``index`` is the number of the sample, from 0."""
    numbers = {name: int(entry[name]) for name in ("step", "prompt", "sample", "tokens")}
    floats = {name: float(entry[name]) if np.isfinite(entry[name]) else None for name in ("reward", "advantage")}
    return {"index": index, **numbers, **floats, "flags": [name for name, bit in FLAGS.items() if entry["flags"] & bit]}


def _filtered(entries: Entries, query: SampleQuery) -> NDArray[np.intp]:
    mask = np.ones(len(entries), bool)
    bounds = (("step", query.step_from, query.step_to), ("reward", query.reward_min, query.reward_max))
    for name, low, high in bounds:
        if low is not None:
            mask &= entries[name] >= low
        if high is not None:
            mask &= entries[name] <= high
    if unknown := set(query.flags) - FLAGS.keys():
        raise bad_field("flag", f"{', '.join(sorted(unknown))} is unknown; use {', '.join(FLAGS)}")
    if query.flags:
        mask &= (entries["flags"] & sum(FLAGS[name] for name in set(query.flags))) > 0
    return np.flatnonzero(mask)


def _ordered(entries: Entries, chosen: NDArray[np.intp], order: str) -> NDArray[np.intp]:
    if order not in ORDERS:
        raise bad_field("order", f"{order!r} is unknown; use {', '.join(ORDERS)}")
    if order in ("newest", "oldest"):
        return chosen[::-1] if order == "newest" else chosen
    values = entries["reward" if order in ("best", "worst") else "tokens"][chosen].astype(float)
    if order in ("best", "longest"):
        values = -values
    return chosen[np.argsort(values, kind="stable")]  # samples without a reward come last


def _records(
    run: OpenedRun, entries: Entries, chosen: NDArray[np.intp], query: SampleQuery
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield pairs (position in ``chosen``, record) from ``query.offset`` on, until a limit of bytes or time is reached."""
    if query.offset >= len(chosen):
        return
    needle = json.dumps(query.text.casefold(), ensure_ascii=False)[1:-1].casefold()
    size, deadline = 0, time.monotonic() + _SEARCH_S
    with run.open(run.files.samples_path) as file:
        for position in range(query.offset, len(chosen)):
            entry = entries[chosen[position]]
            size += int(entry["length"])
            yield position, read_sample(file, entry, text=needle)
            if size > _SEARCH_BYTES or time.monotonic() > deadline:
                return


def _texts(record: dict[str, Any]) -> Iterator[str]:
    yield from (str(record[name]) for name in ("completion", "prompt") if record.get(name))
    yield from _strings(record.get("messages"))


def _strings(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict | list):
            pending.extend(reversed(list(item.values() if isinstance(item, dict) else item)))


def _excerpt(record: dict[str, Any] | None, needle: str) -> dict[str, Any] | None:
    """Return ``excerpt`` (the text around the first match of ``needle``) and ``reward_parts``; None without a match."""
    if record is None:
        return None if needle else {"excerpt": None, "reward_parts": {}}
    texts = _texts(record) if needle else [str(record.get("completion") or "")]
    text, place = next(((text, place) for text in texts if (place := text.casefold().find(needle)) >= 0), ("", -1))
    if place < 0:
        return None
    start = max(place - _EXCERPT // 4, 0)
    cut = text[start : start + _EXCERPT]
    marked = ("…" if start else "") + cut + ("…" if len(text) > start + _EXCERPT else "")
    parts = parts if isinstance(parts := record.get("reward_parts"), dict) else {}
    numbers = {name: part for name, part in parts.items() if isinstance(part, int | float)}
    return {"excerpt": marked, "reward_parts": dict(islice(numbers.items(), _MOST_PARTS))}
