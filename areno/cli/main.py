"""``areno``: runs a command, and reports its errors as messages and exit codes.

Exit code 1 means a failure, 2 a usage error, and 130 an interrupt. Only the module of the command is imported, so that
``--help`` is fast.
"""

import importlib
import io
import os
import sys
from collections.abc import Sequence

from areno import __version__
from areno.errors import ArenoError, UsageError, exit_code, ran_out_of_memory

COMMANDS = {
    "chat": "Talk to a model in the terminal.",
    "check": "Check whether this machine is ready to run AReno.",
    "completion": "Print a script that lets bash, zsh or fish complete areno commands.",
    "convert": "Print the `areno train` command that corresponds to a TRL or verl configuration.",
    "diff": "Compare two runs, and show the first step that differs and why.",
    "export": "Merge an adapter into its base model and write a full checkpoint.",
    "env": "Print a report about this machine, for bug reports.",
    "eval": "Evaluate a model on held-out prompts: accuracy, pass@k, lengths.",
    "explain": "Explain a metric: what it means, which values are normal, and what to do about other values.",
    "inspect": "Show what a run sampled and trained on, token by token.",
    "launch": "Print the Slurm batch script or the Ray resources of an experiment, without starting it.",
    "plot": "Draw metrics of runs as SVG, or write metrics or samples as CSV or Parquet.",
    "plan": "Estimate the memory of a training run, and report whether the run fits.",
    "quickstart": "Teach a tiny model a small task from scratch, in minutes on a CPU.",
    "replay": "Train again on the recorded samples of a step, with different loss options.",
    "report": "Write a one-page report of a run: whether it learned, why it ended, and what to change.",
    "run": "Run an experiment from a YAML file: PPO, GRPO and variants, SFT, DPO or a reward model.",
    "scale": "Change the number of rollout replicas of a run in progress.",
    "serve": "Serve a model over an OpenAI-compatible HTTP API.",
    "train": "Run SFT, DPO, GSPO, GRPO, or PPO training.",
    "view": "Show runs in the browser: curves, samples, conversations, configurations side by side, logs.",
}
"""Command names and their one-line help.

``areno.cli.<name>.run`` takes the arguments after the name and returns the exit code. If ``run`` raises an `ArenoError`,
``main`` reports the error.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (without the program's name) and return the exit code."""
    if argv is None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # because logs and pipes are read while the run is in progress
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # raises BrokenPipeError now instead of at interpreter exit
        return code
    except (ArenoError, SystemExit, KeyboardInterrupt) as error:  # SystemExit: such as after --help
        return exit_code(error)
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        return exit_code(error)
    except BrokenPipeError:
        # The interpreter flushes stdout once more when it exits, which would report the closed pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0
    if argv[0] == "--version":
        print(f"areno {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        from areno.config.options import nearest

        raise UsageError(
            f"{argv[0]!r} is not a command{nearest(argv[0], COMMANDS)}; run `areno --help` to list the commands"
        )
    module = importlib.import_module(f"areno.cli.{_command(argv[0], argv[1:])}")
    return int(module.run(argv[1:]))


def _command(name: str, argv: list[str]) -> str:
    """Return the command to call. With ``--resume``, this is the command that started the run: ``train`` or ``run``."""
    if name not in ("train", "run") or not any(word.startswith("--resume") for word in argv):
        return name
    from areno.cli.run import experiment_to_resume

    return "train" if experiment_to_resume(argv) is None else "run"


def _help() -> str:
    lines = [
        "usage: areno COMMAND [options]",
        "",
        "Reinforcement-learning post-training for language models.",
        "",
        "Commands:",
    ]
    lines += [f"  {name:<12}{text}" for name, text in sorted(COMMANDS.items())]
    lines += ["", "Options:", "  -h, --help  Show this help. `areno COMMAND --help` shows the help of a command."]
    return "\n".join([*lines, "  --version   Show the version."])
