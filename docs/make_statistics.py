"""Writes the tables of ``docs/statistics.md`` from the names in ``areno.observability.experiment_metrics``.

    python docs/make_statistics.py

A test compares the file with the result of :func:`page`, so the tables cannot differ from the code. The text around the tables
is edited by hand.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from areno.observability.experiment_metrics import MEANS, SHORT_NAMES, documented

PAGE = Path(__file__).with_name("statistics.md")
MARK = (
    "<!-- docs/make_statistics.py generates the rest of this page from areno/observability/experiment_metrics.py. -->\n"
)
INTRODUCTIONS = {
    "The actor's update": (
        "The behavior policy sampled the tokens. The proximal policy is the policy at the start of the update. Rejection\n"
        "sampling (setting `rejection_sampling`) and M2PO (setting `m2_threshold`) can\n"
        "[mask tokens](algorithms.md#algorithms-that-share-one-policy-loss). Masked tokens do not contribute to the loss."
    ),
    "Proximal log-probs": (
        "The proximal policy is the policy at the start of the update. With `prox_logp_method=metrics`, areno computes the\n"
        "exact log-probs of the tokens under this policy (`prox_logp_gt`). For comparison, areno also approximates these\n"
        "log-probs (`approx_logp`) with each of the methods\n"
        "[`loglinear`, `linear` and `rollout`](algorithms.md#algorithms-that-share-one-policy-loss)."
    ),
}
"""Text below the titles of some sections."""


def render() -> str:
    """Return the tables as Markdown."""
    short = {full: name for name, full in SHORT_NAMES.items()}
    parts = []
    for title, entries in groupby(documented(), key=lambda entry: entry[0]):
        rows = [
            f"| `{one.name}`{f' (also `{short[one.name]}`)' if one.name in short else ''} "
            f"| {one.exported}{f'; `{one.name}/avg` is also exported as `{one.name}`' if one.name in MEANS else ''} "
            f"| {one.meaning} |"
            for _, one in entries
        ]
        text = [f"{INTRODUCTIONS[title]}\n"] if title in INTRODUCTIONS else []
        parts.append("\n".join([f"## {title}\n", *text, "| Name | Numbers | Meaning |\n|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def page() -> str:
    """Return the whole page, with new tables after the comment ``MARK``, and the text before it unchanged."""
    return PAGE.read_text(encoding="utf-8").partition(MARK)[0] + MARK + "\n" + render()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
