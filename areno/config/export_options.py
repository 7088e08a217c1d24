"""Options of ``areno export``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from areno.config.eval_options import as_in
from areno.config.options import option
from areno.config.parser import CommandOptions, CommandText, parse_command
from areno.config.paths import ckpt_problem, unwritable
from areno.config.run_options import BasicOptions
from areno.config.validate import value_problems
from areno.storage.layout import newest_model

COMMAND = CommandText(
    "areno export",
    "areno export --ckpt ADAPTER --output FOLDER [--dtype TYPE]",
    "Write a full checkpoint in Hugging Face format: an adapter is added to its base model's weights.",
)


@dataclass(frozen=True, kw_only=True)
class ExportOptions(CommandOptions):
    """All options of ``areno export``."""

    ckpt: str | None = as_in(
        BasicOptions,
        "ckpt",
        help="What to export: the folder of an adapter or of a whole model, or a run directory, whose newest checkpoint is "
        "taken. Required.",
    )
    output: str | None = option(None, group="Basic", metavar="FOLDER", help="Where to write it. Required.")
    dtype: str = as_in(
        BasicOptions,
        "dtype",
        help="Type of the written weights; auto is that of the base model's files. They are added in float32.",
    )
    trust_remote_code: bool = as_in(BasicOptions, "trust_remote_code")


def parse_export(argv: Sequence[str]) -> ExportOptions:
    """Parse and check the arguments of ``areno export``."""
    return parse_command(argv, ExportOptions, COMMAND, _with_checkpoint, _problems)


def _with_checkpoint(options: ExportOptions) -> ExportOptions:
    return replace(options, ckpt=options.ckpt and newest_model(options.ckpt, "--ckpt"))


def _problems(options: ExportOptions) -> Iterator[str]:
    if not options.ckpt:
        yield "--ckpt is required; give an adapter, a model folder or a run directory"
    else:
        yield ckpt_problem(options.ckpt)
    yield from value_problems(options)
    if not options.output:
        yield "--output is required; give the folder to write"
        return
    folder = Path(options.output).expanduser()
    if folder.is_dir() and any(folder.iterdir()):
        yield f"--output {options.output} is not empty; choose a new folder"
    yield unwritable(folder, "--output")
