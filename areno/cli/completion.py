"""``areno completion``: prints a script that lets a shell complete commands, options, choices and files.

The script is generated from the argument parsers of all commands. To get the parser of a command, this module runs the
command with ``--help``, and takes the parser that formatted the help.
"""

import argparse
import importlib
import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from typing import NamedTuple

from areno.cli.main import COMMANDS
from areno.config.algorithms import list_algorithms
from areno.config.parser import TypedParser
from areno.config.tracking import SERVICES

_SHELLS = ("bash", "zsh", "fish")
# An option whose placeholder or name matches takes a file.
_PATH = re.compile(r"FILE|PATH|FOLDER|RUN\b|MODEL|ckpt|path|_dir$|config|output")
_BASH = r"""# Completions of areno for __SHELL__. To load the completions, run: source <(areno completion __SHELL__)
__HEAD___areno() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} words="" files="" stem=""
  if [[ $cur == "=" ]]; then cur=""; elif [[ $prev == "=" ]]; then prev=${COMP_WORDS[COMP_CWORD-2]}; fi
  if [[ $cur == --*=* ]]; then prev=${cur%%=*} stem=${cur%%=*}= cur=${cur#*=}; fi
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    words="__COMMANDS__ --help --version"
  else
    case "${COMP_WORDS[1]} $prev" in
__VALUES__
      *) case "${COMP_WORDS[1]} $cur" in
__WORDS__
      esac ;;
    esac
  fi
  if [[ $words ]]; then COMPREPLY=($(compgen -P "$stem" -W "$words" -- "$cur")); fi
  if [[ $files ]]; then
    compopt -o filenames 2>/dev/null
    local IFS=$'\n'
    COMPREPLY+=($(compgen -P "$stem" -f -- "$cur"))
  fi
}
complete -F _areno areno
"""
_ZSH_HEAD = "autoload -Uz bashcompinit && bashcompinit\n"


class _Value(NamedTuple):
    """The values that an argument accepts: words, files, or no value."""

    words: tuple[str, ...] = ()
    files: bool = False
    switch: bool = False
    help: str = ""


_Command = tuple[dict[str, _Value], _Value]
"""The options of a command, by flag, and the values that its positional arguments accept."""


def run(argv: list[str]) -> int:
    """Run the command."""
    parser = TypedParser(
        prog="areno completion",
        description="Print a completion script. To load the script in bash, run `source <(areno completion bash)`. In zsh, run "
        "`compinit` and then `source <(areno completion zsh)`. In fish, run `areno completion fish | source`.",
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=_SHELLS, help="The shell.")
    shell = parser.parse_args(argv).shell
    commands = {name: _command(name) for name in COMMANDS}
    print("\n".join(_fish(commands)) if shell == "fish" else _bash(commands, shell))
    return 0


def _command(name: str) -> _Command:
    """Read the options of a command from its parser.

    Options that are declared in ``areno/algorithms`` are omitted, because importing these files imports torch.
    """
    module, rest = importlib.import_module(f"areno.cli.{name}"), _Value()
    options: dict[str, _Value] = {}
    TypedParser.shown = None
    with redirect_stdout(io.StringIO()) as output, suppress(SystemExit):
        module.run(["--help"])
    shown: TypedParser | None = TypedParser.shown  # set by the call
    for action in shown._actions if shown is not None else ():
        value = _value(action)
        options.update(dict.fromkeys(action.option_strings, value))
        if not action.option_strings:
            rest = _Value(rest.words + value.words, rest.files or value.files)
    # Some commands parse part of their arguments without a parser; their usage text names these arguments.
    usage = output.getvalue() if shown is None else output.getvalue().partition("\n\n")[0]
    for flag, placeholder in re.findall(r"(--[a-z][a-z-]+)(?: ([A-Z]+))?", usage):
        options.setdefault(flag, _Value(files=placeholder == "RUN", switch=not placeholder))
    return options, rest._replace(files=rest.files or "FILE.yaml" in usage)


def _value(action: argparse.Action) -> _Value:
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    choices = action.choices or (metavar[1:-1].split("|") if metavar.startswith("[") else ())
    words = {"algo": list_algorithms(), "track": list(SERVICES)}.get(action.dest, [*map(str, choices)])
    words = [word for word in words if ":" not in word]
    text = (
        "" if action.help == argparse.SUPPRESS else re.split(r"\. | \(default", action.help or "")[0].replace("%%", "%")
    )
    return _Value(tuple(words), not words and bool(_PATH.search(f"{metavar} {action.dest}")), action.nargs == 0, text)


def _bash(commands: dict[str, _Command], shell: str) -> str:
    values, words = [], []
    for name, (options, rest) in commands.items():
        groups: dict[str, list[str]] = {}
        for flag, value in options.items():
            if not value.switch:
                action = "files=1" if value.files else f'words="{" ".join(value.words)}"'
                groups.setdefault(action, []).append(f'"{name} {flag}"')
        values += [f"      {'|'.join(flags)}) {action} ;;" for action, flags in groups.items()]
        words.append(f'      "{name} -"*) words="{" ".join(options)}" ;;')
        words.append(f'      "{name} "*) words="{" ".join(rest.words)}" files={"1" if rest.files else ""} ;;')
    parts = {"HEAD": _ZSH_HEAD if shell == "zsh" else "", "SHELL": shell, "COMMANDS": " ".join(commands)}
    parts |= {"VALUES": "\n".join(values), "WORDS": "\n".join(words)}
    return re.sub(r"__([A-Z]+)__", lambda match: parts[match[1]], _BASH)


def _fish(commands: dict[str, _Command]) -> Iterator[str]:
    yield "# Completions of areno for fish. To load the completions, run: areno completion fish | source"
    yield "complete -c areno -f"
    for name, (options, rest) in commands.items():
        yield f"complete -c areno -n __fish_use_subcommand -a {name} -d {_quoted(COMMANDS[name])}"
        seen = f"complete -c areno -n '__fish_seen_subcommand_from {name}'"
        if rest.words:
            yield f"{seen} -a {_quoted(' '.join(rest.words))}"
        if rest.files:
            yield f"{seen} -F"
        for flag, value in options.items():
            form = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
            takes = "" if value.switch else "-rF" if value.files else f"-x -a {_quoted(' '.join(value.words))}"
            yield " ".join(filter(None, [seen, form, takes, f"-d {_quoted(value.help)}"]))


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
