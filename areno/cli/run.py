"""``areno run``: an experiment from a YAML file and settings on the command line."""

from __future__ import annotations

from collections.abc import Sequence

USAGE = """\
usage: areno run FILE.yaml [key=value ...]
       areno run FILE.yaml --help        all settings of the experiment
       areno run FILE.yaml --dry-run     check everything and show what would be done

Any setting can be given: areno run examples/experiments/grpo.yaml actor.optimizer.lr=1e-3 seed=42
What the file says in train_dataset.type decides what is run: rl, sft, rw or dpo.
"""


def run(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: arguments after ``run``.

    Returns:
        The exit code.

    Raises:
        ArenoError: the configuration is wrong, or the experiment failed.
    """
    words = list(argv)
    if not words or words in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    if not words[0].startswith("-") and "=" not in words[0]:
        words.insert(0, "--config")
    from areno.experiments.run import main

    main(words)
    return 0
