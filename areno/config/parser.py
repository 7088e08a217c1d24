"""Parses the arguments of a command into its options, and formats its help.

argparse only collects strings. `convert_values` converts strings and YAML values, and reports all of their errors together.
"""

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, TypeVar

from areno.config.algorithms import AlgorithmSpec, get_algorithm
from areno.config.all_train_options import OUTPUT_DIRECTORIES, TrainOptions
from areno.config.options import GROUPS, Option, convert, flag_of, nearest, options_of
from areno.config.yaml_io import load_config
from areno.errors import UsageError

_MODEL_OPTIONS = {"--ckpt": "--model-path", "--model-path": "--ckpt"}
"""Options that have another name in another command; an error message suggests the right name."""


@dataclass(frozen=True, slots=True)
class CommandText:
    """Texts of a command's help. ``prog`` is the command, such as ``areno train``."""

    prog: str
    usage: str
    description: str
    epilog: str = "Every on/off option --NAME can be turned off with --no-NAME."


TRAIN = CommandText(
    "areno train",
    "areno train --ckpt MODEL --dataset-path DATA --reward-fn-path FILE.PY [--algo NAME] [options]",
    "Train a language model with the local areno engine: load data, roll out, score, update and save.",
    "Every on/off option --NAME can be turned off with --no-NAME. Every option except --config can also be set in the YAML "
    "file that is passed with --config. "
    "Names in parentheses after an option are the built-in algorithms that read the option; variants such as dapo may also "
    "read the option.",
)

PLAN = CommandText(
    "areno plan",
    "areno plan --ckpt MODEL [--algo NAME] [options of areno train] [--json]\n"
    "       areno plan FILE.yaml [key=value ...] [--tune-params] [--json]",
    "Estimate the memory of each phase of a training run, and report whether the run fits into the free memory of this "
    "machine. If the run does not fit, the report suggests changes. The command accepts the options of `areno train`, but "
    "needs neither data nor rewards, and does not load the weights. FILE.yaml is an experiment file of `areno run`. For such "
    "a file, the command estimates the memory of each engine of the experiment; --tune-params also prints the largest "
    "concurrency and microbatch size that fit. "
    "--json prints the estimate as JSON, in bytes. The exit code is 1 if the run does not fit.",
    TRAIN.epilog,
)


@dataclass
class Problems:
    """Collects input errors, so that all errors are reported at once."""

    messages: list[str] = field(default_factory=list)

    def add(self, problem: str) -> None:
        """Add a problem; empty strings and duplicates are ignored."""
        if problem and problem not in self.messages:
            self.messages.append(problem)

    @classmethod
    def raise_all(cls, messages: Iterable[str]) -> None:
        """Raise UsageError with the non-empty messages; do nothing if all messages are empty."""
        problems = cls()
        for message in messages:
            problems.add(message)
        problems.raise_if_any()

    def raise_if_any(self) -> None:
        """Raise UsageError if there are problems. Several problems become a numbered list."""
        if len(self.messages) == 1:
            raise UsageError(self.messages[0])
        if self.messages:
            lines = "".join(f"\n  {number}. {problem}" for number, problem in enumerate(self.messages, start=1))
            raise UsageError(f"{len(self.messages)} problems:{lines}")


class TypedParser(argparse.ArgumentParser):
    """An argument parser that raises `UsageError` instead of exiting."""

    shown: "ClassVar[TypedParser | None]" = None
    """The parser whose help was formatted last. ``areno completion`` reads a command's options from this parser."""

    def format_help(self) -> str:
        """Format the help."""
        TypedParser.shown = self
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        match = re.fullmatch(r"argument (--[\w-]+)(?:/--[\w-]+)*: (.*)", message)
        flag, reason = match.groups() if match else ("", message)
        if reason.startswith("expected"):
            raise UsageError(
                f"{flag} needs a value; write {flag} VALUE, or {flag}=VALUE if the value starts with dashes"
            )
        if "explicit argument" in reason:
            value = reason.rpartition("explicit argument ")[2]
            raise UsageError(
                f"{flag} takes no value, but got {value}; write {flag} without a value (to turn off "
                "an on/off option --NAME, write --no-NAME)"
            )
        raise UsageError(f"{flag} {reason}; see {self.prog} --help".strip())


def parse_train(argv: Sequence[str]) -> TrainOptions:
    """Parse the arguments of ``areno train``. Flags override values of ``--config``.

    Unknown options and values of the wrong type are reported together, with the most similar name for each unknown option.
    `areno.config.validate` checks the values later.
    """
    core = options_of(TrainOptions)
    flags, _ = _read(argv, core, TRAIN)
    config = _read_config(flags)
    problems = Problems()
    spec = _spec_of(flags, config, problems)
    entries = {entry.name: entry for entry in (*core, *extra_options(spec))}
    flags, unread = _read(argv, list(entries.values()), TRAIN)
    if spec is not None:
        _add_unread(unread, entries.values(), TRAIN, problems)
    values = convert_values(
        config, entries, lambda name: f"{flags['config']}: {name}", problems, known_only=spec is None
    )
    values |= convert_values(flags, entries, flag_of, problems)
    problems.raise_if_any()
    return build_options(values, spec, explicit=frozenset(values))


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Options of a command other than ``areno train``. ``explicit`` contains the names of the options that the command line
    sets.
    """

    explicit: frozenset[str] = frozenset()


CommandT = TypeVar("CommandT", bound=CommandOptions)


def parse_command(
    argv: Sequence[str],
    declaration: type[CommandT],
    command: CommandText,
    complete: Callable[[CommandT], CommandT],
    problems_of: Callable[[CommandT], Iterable[str]],
) -> CommandT:
    """Parse the arguments of a command, complete the options with ``complete``, and check the result with ``problems_of``.

    ``--help`` prints the help and raises SystemExit.
    """
    kind: type = declaration
    entries = {entry.name: entry for entry in options_of(kind)}
    if "-h" in argv or "--help" in argv:
        sys.stdout.write(_help_of(list(entries.values()), command, {}))
        raise SystemExit(0)
    flags, unread = _read(argv, list(entries.values()), command)
    problems = Problems()
    _add_unread(unread, entries.values(), command, problems)
    values = convert_values(flags, entries, flag_of, problems)
    problems.raise_if_any()
    options = complete(declaration(**values, explicit=frozenset(values)))
    Problems.raise_all(problems_of(options))
    return options


def extra_options(spec: AlgorithmSpec | None) -> tuple[Option, ...]:
    """Return the options that the algorithm declares. Raises UsageError if an option has the name of a built-in option."""
    if spec is None:
        return ()
    reserved = {entry.name for entry in options_of(TrainOptions)} | {"explicit", "extra", "help"}
    extra = spec.own_options()
    for entry in extra:
        if entry.name in reserved:
            raise UsageError(
                f"algorithm {spec.name} declares {entry.flag}, which is already an option of areno train; rename "
                "the algorithm's option"
            )
    return extra


def convert_values(
    raw: Mapping[str, Any], entries: Mapping[str, Option], label: Any, problems: Problems, known_only: bool = False
) -> dict[str, Any]:
    """Convert values from flags or YAML to the types of their options. In ``raw`` and in the result, the keys are option names.

    Wrong types and unknown names are added to ``problems``. With ``known_only``, unknown names are ignored, because they may
    be options of an algorithm that could not be loaded.

    ``label`` maps an option name to its name in messages.
    """
    values = {}
    for name, value in raw.items():
        if name not in entries:
            if not known_only:
                problems.add(f"{label(name)} is not an option{nearest(name, entries)}; see `areno train --help`")
            continue
        try:
            values[name] = convert(entries[name], value, label(name))
        except UsageError as error:
            problems.add(str(error))
    return values


def build_options(values: Mapping[str, Any], spec: AlgorithmSpec | None, explicit: frozenset[str]) -> TrainOptions:
    """Create options from converted values.

    The field ``extra`` contains the algorithm's own options, with their values or defaults. A leading ``~`` of an output
    directory is expanded.
    """
    core_names = {entry.name for entry in options_of(TrainOptions)}
    extra = {entry.name: values.get(entry.name, entry.default) for entry in extra_options(spec)}
    core = {name: value for name, value in values.items() if name in core_names}
    core |= {name: os.path.expanduser(core[name]) for name in OUTPUT_DIRECTORIES if core.get(name)}
    if ".py" not in core.get("algo", ".py"):
        core["algo"] = core["algo"].lower()  # registry names are case-insensitive, paths are not
    return TrainOptions(**core, extra=extra, explicit=explicit)


def train_help(argv: Sequence[str], command: CommandText = TRAIN) -> str:
    """Format ``areno train --help``, including the options of the algorithm in ``--algo``."""
    core = options_of(TrainOptions)
    flags, _ = _read([word for word in argv if word not in ("-h", "--help")], core, command)
    spec = _spec_of(flags, _read_config(flags), Problems())
    extra = {f"Options of {spec.name}": extra_options(spec)} if spec is not None and spec.options is not None else {}
    return _help_of(core, command, extra)


def _help_of(entries: Sequence[Option], command: CommandText, extra: Mapping[str, Sequence[Option]]) -> str:
    parser = _make_parser([], command)
    sections = {group: [entry for entry in entries if entry.info.group == group] for group in GROUPS}
    for title, members in {**sections, **extra}.items():
        if members:
            _add_arguments(parser.add_argument_group(title), members)
    return parser.format_help()


def _make_parser(entries: Sequence[Option], command: CommandText) -> TypedParser:
    parser = TypedParser(
        prog=command.prog,
        usage=command.usage,
        description=command.description,
        epilog=command.epilog,
        allow_abbrev=False,
        add_help=False,
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=34, width=118),
    )
    _add_arguments(parser, entries)
    return parser


def _add_arguments(parser: argparse._ActionsContainer, entries: Sequence[Option]) -> None:
    for entry in entries:
        text = _help_text(entry).replace("%", "%%")
        if entry.kind is bool:
            negative = "--no-" + entry.flag.removeprefix("--")
            pair = [entry.flag, negative] if entry.default else [entry.flag]
            parser.add_argument(*pair, action=_OnOff, dest=entry.name, nargs=0, help=text)
            if not entry.default:
                parser.add_argument(negative, action=_OnOff, dest=entry.name, nargs=0, help=argparse.SUPPRESS)
        else:
            bare: dict[str, Any] = {"nargs": "?", "const": entry.info.bare} if entry.info.bare else {}
            parser.add_argument(
                entry.flag,
                action="append",
                dest=entry.name,
                metavar=entry.metavar.replace("%", "%%"),
                help=text,
                **bare,
            )


class _OnOff(argparse.Action):
    """Stores [True] for the plain flag and [False] for its ``--no-`` form. If both forms are given, the last form counts."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, [option_string == flag_of(self.dest)])


def _help_text(entry: Option) -> str:
    notes = [entry.info.help]
    if entry.default_text:
        notes.append(f"Default: {entry.default_text}.")
    if entry.info.algorithms:
        notes.append(f"({', '.join(entry.info.algorithms)})")
    return " ".join(notes)


def _read(argv: Sequence[str], entries: Sequence[Option], command: CommandText) -> tuple[dict[str, Any], list[str]]:
    """Return a dict from option names to the values of their flags, and the words that are not recognized."""
    takes_value = {entry.flag for entry in entries if entry.kind is not bool}
    words: list[str] = []
    for word in argv:
        # argparse would take a value such as -1e-6 for a flag.
        if words and words[-1] in takes_value and word.startswith("-") and not word.startswith("--"):
            words[-1] += "=" + word
        else:
            words.append(word)
    namespace, unread = _make_parser(entries, command).parse_known_args(words)
    many = {entry.name for entry in entries if entry.many}
    values = {name: value for name, value in vars(namespace).items() if value is not None}
    return {name: value if name in many else value[-1] for name, value in values.items()}, unread


def _add_unread(unread: Sequence[str], entries: Iterable[Option], command: CommandText, problems: Problems) -> None:
    flags = [entry.flag for entry in entries]
    spellings = [*flags, *("--no-" + flag.removeprefix("--") for flag in flags)]
    dashed = [word.split("=")[0] for word in unread if word.startswith("-")]
    for word in dashed:
        other = _MODEL_OPTIONS.get(word)
        near = (
            f"; in this command, the option is called {other}"
            if other in spellings
            else nearest(flag_of(word.lstrip("-")), spellings)
        )
        problems.add(f"{word} is not an option{near}; see {command.prog} --help")
    for word in unread if not dashed else ():
        problems.add(f"unexpected argument {word!r}; write the option before its value, and quote values with spaces")


def _read_config(flags: Mapping[str, Any]) -> dict[str, Any]:
    loaded = load_config(flags["config"]) if "config" in flags else {}
    if "config" in loaded:
        raise UsageError(
            f"--config {flags['config']}: a config file cannot name another config file; remove "
            "the key `config`, and add the options of the other file"
        )
    return loaded


def _spec_of(flags: Mapping[str, Any], config: Mapping[str, Any], problems: Problems) -> AlgorithmSpec | None:
    try:
        return get_algorithm(str(flags.get("algo", config.get("algo", TrainOptions.algo))))
    except UsageError as error:
        problems.add(str(error))
        return None
