"""What each setting does: the test that shows its effect, or the words with which it is refused.

The rows are in `areno.config.experiment.effect_table`. A refused setting is refused when its value differs from the
default: files that spell defaults out load, and nothing is accepted that nothing reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from areno.config.experiment.effect_table import EFFECTS, REFUSED, REFUSED_VALUES
from areno.config.experiment.settings import Setting, walk


@dataclass(frozen=True)
class Refused:
    """The setting is not there yet.

    Attributes:
        words: what is missing, and what to do instead; part of the error.
    """

    words: str


@dataclass(frozen=True)
class Effect:
    """The setting works.

    Attributes:
        test: the test that shows it, as ``tests/path.py::name``.
    """

    test: str


@dataclass(frozen=True)
class Parts:
    """A section: each of its settings has a row of its own."""


Entry = Refused | Effect | Parts


def entry_of(entry: Setting) -> Entry:
    """Look up the row of a setting, by ``Class.field`` of the class that declares it first, else ``Class.*``.

    Raises:
        KeyError: there is no row; a user's own field has none.
    """
    key, all_of_class = f"{entry.owner}.{entry.name}", f"{entry.owner}.*"
    if key in EFFECTS:
        return Effect(EFFECTS[key])
    for name in (key, all_of_class):
        if name in REFUSED:
            return Refused(REFUSED[name])
    if entry.shape in ("section", "sections"):
        return Parts()
    raise KeyError(key)


def refusal(entry: Setting, value: Any) -> str:
    """Words with which a value is refused; empty if it is not."""
    try:
        row = entry_of(entry)
    except KeyError:  # a field of a user's own class
        return ""
    if isinstance(row, Refused):
        return row.words if value != entry.default else ""
    values = REFUSED_VALUES.get(f"{entry.owner}.{entry.name}", {})
    return values.get(value, "") if isinstance(value, str) else ""


def refusals(config: Any) -> Iterator[str]:
    """Say what a configuration asks for that is not there yet: one message per section and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for path, entry, value in walk(config):
        if words := refusal(entry, value):
            where, _, name = path.rpartition(".")
            text = (
                name
                if isinstance(value, dict | list) or not isinstance(value, str | int | float)
                else f"{name}={value}"
            )
            found.setdefault((where, words), []).append(text)
    for (where, words), names in found.items():
        yield f"{where + ': ' if where else ''}{', '.join(names)}: {words}"
