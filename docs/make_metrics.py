"""Writes the tables of metrics in ``docs/run-directory.md``, from ``areno.observability``.

    python docs/make_metrics.py

A test compares the file with the result of :func:`page`, so the tables cannot differ from the code. The text around the tables
is edited by hand.
"""

from __future__ import annotations

from pathlib import Path

from areno.observability.metric_advice import ADVICE
from areno.observability.train_metrics import SECTIONS, expanded

PAGE = Path(__file__).with_name("run-directory.md")
BEGIN = (
    "<!-- docs/make_metrics.py generates the text from here to the next comment. Sources: train_metrics.py and "
    "metric_advice.py in areno/observability. -->\n"
)
END = "<!-- The end of what docs/make_metrics.py writes. -->\n"
_NOTE = (
    "With DAPO, CISPO, SAPO, M2PO or IcePop, the metrics `train/*` also include the statistics that `areno run` reports for "
    "[the actor's update](statistics.md#the-actors-update).\n"
)


def render() -> str:
    """Return the tables of metrics as Markdown."""
    parts = []
    for title, prefix, rows in SECTIONS:
        lines = [
            f"| {', '.join(f'`{name}`' for name in expanded(names))} | {unit} | {meaning} |"
            for names, unit, meaning in rows
        ]
        parts += [f"### {title}: `{prefix}*`\n", "| Name | Unit | Meaning |\n|---|---|---|", *lines, ""]
    advice = [f"| `{name}` | {one.text} | {one.remedy} |" for name, one in ADVICE.items()]
    parts += [_NOTE, "### What is normal\n", "| Name | Normal | If it is not |\n|---|---|---|", *advice, ""]
    return "\n".join(parts)


def page() -> str:
    """Return the whole page, with new tables between the comments ``BEGIN`` and ``END``, and the other text unchanged."""
    text = PAGE.read_text(encoding="utf-8")
    return text.partition(BEGIN)[0] + BEGIN + "\n" + render() + "\n" + END + text.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
