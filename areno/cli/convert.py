"""``areno convert``: prints the ``areno train`` command that corresponds to a TRL or verl configuration."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from areno.config.conversion import convert
from areno.config.parser import TypedParser
from areno.config.yaml_io import flat, read_mapping
from areno.errors import UsageError


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = TypedParser(
        prog="areno convert",
        description="Print the `areno train` command that corresponds to a TRL or verl configuration, and list the settings "
        "that cannot be converted. Experiments of AReaL need no conversion: run `areno run FILE.yaml`.",
        allow_abbrev=False,
    )
    parser.add_argument("tool", choices=("trl", "verl"), help="The tool that the configuration is written for.")
    parser.add_argument(
        "settings",
        metavar="FILE.yaml | --name value | name=value",
        nargs=argparse.REMAINDER,
        help="Settings to convert: a YAML file, settings in the syntax of the tool's command line, or both. If a setting "
        "occurs twice, the last value counts.",
    )
    parser.add_argument(
        "--kind", choices=("grpo", "sft", "dpo"), default="grpo", help="Training method of the TRL run (default: grpo)."
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        help="Number of devices of the TRL run (default: 1); TRL's batch sizes are per device.",
    )
    options = parser.parse_args(argv)
    if options.devices < 1:
        raise UsageError(f"--devices must be at least 1, got {options.devices}")
    settings = dict(_settings_of(options.settings))
    if not settings:
        raise UsageError(
            "areno convert needs settings to convert; give a YAML file, or settings such as --learning_rate 1e-6 or "
            "data.train_batch_size=64"
        )
    conversion = convert(options.tool, settings, options.kind, options.devices)
    print(conversion.command)
    if conversion.notes:
        print("\nnot included:", *conversion.notes, sep="\n  ", file=sys.stderr)
    return 0


def _settings_of(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of settings, given as YAML files, as ``--name value`` or as ``name=value``."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.lstrip("-+").partition("=")
        if word.startswith("--"):
            name = name.replace("-", "_")
        if word.endswith((".yaml", ".yml")) and not equals:
            yield from (item for item in flat(read_mapping(Path(word), word)) if item[1] is not None)
        elif equals:
            yield name, _value(value)
        elif word.startswith("--"):
            has_value = bool(rest) and not rest[0].startswith("--")
            yield name, _value(rest.pop(0)) if has_value else True
        else:
            raise UsageError(
                f"{word} is neither a YAML file nor a setting; write a setting as --name value or name=value"
            )


def _value(text: str) -> Any:
    """Parse the value of a setting as YAML.

    Invalid YAML is returned unchanged, and so is a text of the form ``name: value``.
    """
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, dict) and not text.startswith("{") else value
