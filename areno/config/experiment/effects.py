"""Which settings are refused, and which are accepted although they change nothing.

The rows are in `areno.config.experiment.effect_table`. A refused setting is refused when its value differs from the
default, areno's or the documented one: files that spell defaults out load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from areno.config.experiment.effect_table import HARMLESS, REFUSED, REFUSED_VALUES
from areno.config.experiment.settings import Setting, walk


def words_of(entry: Setting, table: Mapping[str, str]) -> str:
    """The row of a setting, by ``Class.field`` of the class that declares it first, else ``Class.*``; empty without one."""
    return table.get(f"{entry.owner}.{entry.name}", table.get(f"{entry.owner}.*", ""))


def refusal(entry: Setting, value: Any) -> str:
    """Words with which a value is refused; empty if it is not."""
    if value == entry.default or (value is not None and value == entry.info.documented):
        return ""
    values = REFUSED_VALUES.get(f"{entry.owner}.{entry.name}", {})
    return words_of(entry, REFUSED) or (values.get(value, "") if isinstance(value, str) else "")


def refusals(config: Any) -> Iterator[str]:
    """Say what a configuration asks for that is not supported: one message per section and reason."""
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


def harmless(config: Any) -> Iterator[tuple[str, str]]:
    """Give each setting that has another value than its default and changes nothing, with the reason.

    Of a section whose settings share one reason only the section is named.
    """
    for path, entry, value in walk(config):
        reason = words_of(entry, HARMLESS)
        if not reason or value == entry.default or (entry.shape in ("section", "sections") and value is None):
            continue
        whole = f"{entry.owner}.*" in HARMLESS
        yield (path.rpartition(".")[0] if whole else path), reason
