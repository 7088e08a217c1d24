"""Writes ``docs/options.md`` from the option declarations in ``areno.config``.

    python docs/make_options.py

A test compares the file with the result of :func:`render`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from areno.config import AlgorithmSpec, Option, TrainOptions, get_algorithm, list_algorithms, options_of
from areno.config.options import GROUPS

PAGE = Path(__file__).with_name("options.md")

_HEAD = """\
# Options of `areno train`

<!-- Written by docs/make_options.py from the declarations in areno/config; do not edit by hand. -->

[train.md](train.md) explains the command. Every option is a flag. Every option except `--config` may also be a line of the
`--config` file. An on/off option also has a `--no-` form. The column "Only" lists the built-in algorithms that read an option.
Variants of these algorithms, such as `dapo`, may also read the option. It is an error to set an option that the algorithm does
not read. The column "Resume" shows whether a run that is resumed with `--resume` may change the option.
"""
_COLUMNS = "| Option | Default | Only | Resume | Meaning |\n|---|---|---|---|---|"


def render() -> str:
    """Return the whole page as Markdown."""
    entries = options_of(TrainOptions)
    sections = (_section(group, [e for e in entries if e.info.group == group]) for group in GROUPS)
    return "\n".join([_HEAD, *sections, *_of_algorithms()])


def _of_algorithms() -> Iterator[str]:
    specs = [get_algorithm(name) for name in list_algorithms()]
    for declaration in dict.fromkeys(spec.options for spec in specs if spec.options is not None):
        own = [spec for spec in specs if spec.options is declaration]
        yield _section(
            "Only " + ", ".join(spec.name for spec in own), AlgorithmSpec("", options=declaration).own_options()
        )
        for spec in own:
            plain = AlgorithmSpec("", options=declaration).own_options()
            for entry in (each for each in spec.own_options() if each not in plain):
                yield f"With `--algo {spec.name}`, `{entry.flag}` defaults to {str(entry.default).lower()}.\n"


def _section(title: str, entries: Iterable[Option]) -> str:
    return "\n".join([f"## {title}\n", _COLUMNS, *map(_row, entries), ""])


def _row(entry: Option) -> str:
    info = entry.info
    value = "" if entry.kind is bool else " " + entry.metavar
    cells = (
        f"`{entry.flag}{value}`",
        entry.default_text or ("off" if entry.kind is bool else ""),
        ", ".join(info.algorithms),
        "" if info.changes_results else "may change",
        info.help,
    )
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    # A bar would end the cell; angle brackets outside code would be parsed as HTML.
    return text.replace("|", "\\|") if text.startswith("`") else text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
