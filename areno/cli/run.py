"""``areno run``: runs an experiment from a YAML file and settings on the command line."""

from collections.abc import Sequence
from pathlib import Path

from areno.storage.run_layout import CONFIG, is_experiment, is_run

RESUME = "--resume"
USAGE = """\
usage: areno run FILE.yaml [key=value ...]
       areno run --resume RUN [key=value ...]
       areno run FILE.yaml --help        list all settings of the experiment
       areno run FILE.yaml --dry-run     check settings and data, and show what would run

Any setting can be overridden: areno run examples/experiments/grpo.yaml actor.optimizer.lr=1e-3 seed=42
train_dataset.type in the file selects the kind of experiment: rl, sft, rw or dpo. --resume continues the run in the
directory RUN. If this run was started with `areno train`, pass options of `areno train` instead of key=value.
"""


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    words = list(argv)
    if not words or words in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    resumed = experiment_to_resume(words)
    if resumed is not None:
        words = ["--config", str(resumed[0] / CONFIG), *resumed[1]]
    elif not words[0].startswith("-") and "=" not in words[0]:
        words.insert(0, "--config")
    from areno.experiments.run_experiment import main

    main(words, resumed and resumed[0])
    return 0


def experiment_to_resume(argv: Sequence[str]) -> tuple[Path, list[str]] | None:
    """Return the run directory that ``--resume`` names, and the arguments without ``--resume``.

    Return None if there is no ``--resume``, or if the run was not started by ``areno run``.
    """
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith(f"{RESUME}=") else [word])]
    if RESUME not in words[:-1]:
        return None
    index = words.index(RESUME)
    run = Path(words[index + 1]).expanduser()
    if not is_run(run) or not is_experiment(run, RESUME):
        return None
    return run, [*words[:index], *words[index + 2 :]]
