"""Prepares samples for a report: texts of bounded length, and tokens with values such as log-prob and advantage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areno.observability.samples import bounded
from areno.reports.run_samples import sample_id
from areno.reports.svg import short
from areno.storage.json_lines import as_float

MAX_TOKENS = 6000
"""Maximum number of tokens that a report shows one by one, in total over all samples."""
SAMPLE_TOKENS = 400
"""Maximum number of tokens of a training row that are shown one by one. Half are from its start, and half from its end."""
CONTEXT_CHARS = 600
"""Maximum number of characters that are shown of a prompt, of a data row, or of a segment that is shown as plain text."""
MAX_SEGMENTS = 60
"""Maximum number of segments shown for each training row."""
TEXT_CHARS = 2000
"""If the tokens of an answer were not recorded, a report shows at most this many characters of the answer."""
NAME_CHARS = 200
"""Maximum number of characters of a token, a role name or the name of a reward part."""
GAP = 0.1
"""Difference between the log-probs of rollout and training, in nats, above which a token is marked."""


@dataclass(frozen=True, slots=True)
class TokenView:
    """A token. ``numbers`` lists the token's values, such as log-prob and advantage, as text. ``marks`` has its CSS classes."""

    text: str
    numbers: str
    marks: str


@dataclass(slots=True)
class SegmentView:
    """Consecutive tokens that have the same role, turn and weight version. Either all or none of them are trained on.

    ``label`` describes these attributes. A segment has either ``tokens`` or only the ``text`` of its tokens.
    """

    label: str
    tokens: list[TokenView] = field(default_factory=list)
    text: str = ""
    omitted: int = 0


@dataclass(slots=True)
class SampleView:
    """A sample with formatted numbers.

    ``rows`` has the segments of each training row. It is empty if no tokens were recorded, or if the page already shows
    ``MAX_TOKENS`` tokens.
    """

    id: str
    numbers: list[tuple[str, str]]
    parts: list[tuple[str, str]]
    prompt: str
    data: str
    answer: str
    rows: list[list[SegmentView]]
    reward: float

    @property
    def anchor(self) -> str:
        """ID of the sample's element in the page."""
        return f"sample-{self.id.replace('/', '-')}"


class SampleViews:
    """Formats the samples of a page. In total, at most ``MAX_TOKENS`` tokens are shown individually."""

    def __init__(self) -> None:
        self._left = MAX_TOKENS

    def view(self, record: Mapping[str, Any]) -> SampleView:
        """Format a record of ``samples.jsonl``."""
        rows = [self._row(row) for row in record.get("rows", ()) if self._left > 0]
        return SampleView(
            id=sample_id(record),
            numbers=list(_numbers(record)),
            parts=[
                (bounded(name, NAME_CHARS), number(value)) for name, value in record.get("reward_parts", {}).items()
            ],
            prompt=bounded(record.get("prompt"), CONTEXT_CHARS),
            data=data_text(record),
            answer=bounded(record.get("completion"), TEXT_CHARS),
            rows=rows,
            reward=as_float(record.get("reward")),
        )

    def _row(self, row: Sequence[Mapping[str, Any]]) -> list[SegmentView]:
        """Return the segments of a training row.

        If the model sampled a segment or is trained on it, its tokens are shown one by one. Other segments are shown as text.
        """
        left_out, row = len(row) - MAX_SEGMENTS, row[:MAX_SEGMENTS]
        shown = sum(len(segment["tokens"]) for segment in row if _is_detailed(segment))
        most = min(SAMPLE_TOKENS, self._left)
        self._left -= min(shown, most)
        omitted = range(most // 2, shown - most // 2) if shown > most else range(0)
        views, position = [], 0
        for segment in row:
            view = SegmentView(_label(segment))
            if _is_detailed(segment):
                end = position + len(segment["tokens"])
                kept = [place - position for place in range(position, end) if place not in omitted]
                view.tokens = [_token(segment, place) for place in kept]
                view.omitted, position = end - position - len(kept), end
            else:
                view.text = bounded("".join(segment["texts"]), CONTEXT_CHARS)
            views.append(view)
        return views if left_out <= 0 else [*views, SegmentView(f"and {left_out} more segments")]


def _is_detailed(segment: Mapping[str, Any]) -> bool:
    return segment["trained"] or segment["version"] >= 0 or segment["role"] in ("text", "call")


def _label(segment: Mapping[str, Any]) -> str:
    parts = [bounded(segment["role"], NAME_CHARS)]
    parts += [f"turn {segment['turn']}"] if segment["turn"] >= 0 else []
    parts.append("trained" if segment["trained"] else "not trained")
    parts += [f"weights of version {segment['version']}"] if segment["version"] >= 0 else []
    count = len(segment["tokens"])
    parts.append(f"{count} token" + ("" if count == 1 else "s"))
    if segment["trained"] and count:
        advantages = [*map(as_float, segment["advantages"])]
        low, high = min(advantages), max(advantages)
        parts.append(f"advantage {_signed(low)}" + (f" to {_signed(high)}" if high != low else ""))
    return ", ".join(parts)


def _token(segment: Mapping[str, Any], place: int) -> TokenView:
    """Describe a token of a segment. ``train_logprobs`` and ``clipped`` are missing if the run did not record them."""
    sampled, trained = (
        as_float((segment.get(name) or {place: None})[place]) for name in ("logprobs", "train_logprobs")
    )
    numbers, marks = [f"token {segment['tokens'][place]}", f"log-prob {sampled:.4f}"], "m"
    if segment["trained"]:
        advantage = as_float(segment["advantages"][place])
        marks = "p" if advantage > 0 else "n" if advantage < 0 else "z"
        numbers.append(f"advantage {_signed(advantage)}")
    else:
        numbers.append("not trained")
    numbers += [f"version {segment['version']}"] if segment["version"] >= 0 else []
    if not math.isnan(gap := trained - sampled):
        numbers.append(f"log-prob in training {trained:.4f} (difference {_signed(gap)})")
        marks += " g" if abs(gap) > GAP else ""
    if segment.get("clipped") and segment["clipped"][place]:
        numbers.append("clipped")
        marks += " c"
    return TokenView(bounded(segment["texts"][place], NAME_CHARS).replace("\n", "↵\n"), ", ".join(numbers), marks)


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "Reward", number(record.get("reward"))
    if record.get("advantage") is not None:
        yield "Advantage", _signed(as_float(record["advantage"]))
    yield (
        "Length",
        f"{record.get('response_len', '?')} tokens" + (" (truncated)" if is_truncated(record) else ""),
    )
    if record.get("logprob_mean") is not None:
        yield "Mean log-prob", number(record["logprob_mean"])
    segments = [segment for row in record.get("rows", ()) for segment in row]
    gaps = [
        abs(gap)
        for segment in segments
        for sampled, trained in zip(segment["logprobs"], segment.get("train_logprobs") or (), strict=False)
        if not math.isnan(gap := as_float(trained) - as_float(sampled))
    ]
    if gaps:
        yield "Log-prob gap", f"{short(sum(gaps) / len(gaps))} on average, at most {short(max(gaps))}"
    if clipped := sum(bool(flag) for segment in segments for flag in segment.get("clipped") or ()):
        yield "Clipped", f"{clipped} of {sum(len(segment['tokens']) for segment in segments)} tokens"


def data_text(record: Mapping[str, Any]) -> str:
    """Return the fields of a sample's data row, such as the expected answer, as lines of text. The prompt is not included.

    The text is empty if the data row was not recorded.
    """
    data = record.get("data")
    fields = data.items() if isinstance(data, dict) else ()
    return bounded("\n".join(f"{name}: {value}" for name, value in fields), CONTEXT_CHARS)


def is_truncated(record: Mapping[str, Any]) -> bool:
    """Return whether an answer was truncated at the maximum length."""
    return record.get("finish_reason") == "length"


def number(value: Any) -> str:
    """Format a number of a record."""
    return short(as_float(value))


def _signed(value: float) -> str:
    return f"{value:+.3g}"
