"""``--resume RUN`` of ``areno train`` and ``areno run`` alike: the run itself says which of the two goes on with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from areno.storage.layout import is_experiment, is_run

OPTION = "--resume"


def experiment_to_resume(argv: Sequence[str]) -> tuple[Path, list[str]] | None:
    """The experiment's run directory that ``--resume`` names, and the other arguments.

    None where it names no directory, or one that ``areno train`` wrote."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith(f"{OPTION}=") else [word])]
    if OPTION not in words[:-1]:
        return None
    place = words.index(OPTION)
    run = Path(words[place + 1]).expanduser()
    if not is_run(run) or not is_experiment(run, OPTION):
        return None
    return run, [*words[:place], *words[place + 2 :]]
