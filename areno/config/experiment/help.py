"""``--help`` of an experiment: every key with its default, bounds and meaning, section by section."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from areno.config.experiment.experiments import BaseExperimentConfig
from areno.config.experiment.settings import Setting, settings_of

_WIDTH = 110


def render_help(config_cls: type[BaseExperimentConfig]) -> str:
    """Lay out all keys of an experiment as text, with a newline at the end."""
    doc = " ".join((config_cls.__doc__ or "").split("\n\n")[0].split())
    head = [
        "usage: PROGRAM.py --config FILE.yaml [key=value ...] [~key ...]",
        "",
        f"{config_cls.__name__}: {doc}",
        "Every key below can stand in the file, and be set on the command line. null is no value; lists are [a, b].",
    ]
    return "\n".join([*head, *_section(config_cls, "", set())]) + "\n"


def _section(declaration: type, prefix: str, shown: set[type]) -> Iterator[str]:
    entries = settings_of(declaration).items()
    yield ""
    yield f"{prefix.rstrip('.') or 'Experiment'}:"
    for name, entry in entries:
        yield from _lines(prefix + name, entry, repeated=entry.kind in shown)
    for name, entry in entries:
        inside = f"{prefix}{name}{'.0' if entry.shape == 'sections' else ''}."
        if entry.shape in ("section", "sections") and entry.kind not in shown:
            shown.add(entry.kind)
            yield from _section(entry.kind, inside, shown)


def _lines(path: str, entry: Setting, *, repeated: bool) -> Iterator[str]:
    default = entry.default_text
    text = entry.info.help + (f" One of: {', '.join(entry.info.choices)}." if entry.info.choices else "")
    if repeated and entry.shape in ("section", "sections"):
        text += f" Keys as those of {entry.kind.__name__} above."
    yield f"  {path}: {entry.type_text}" + (f" = {default}" if default else "")
    yield from textwrap.wrap(text, _WIDTH, initial_indent="      ", subsequent_indent="      ")
