"""``areno launch``: shows what an experiment would start on a cluster, without starting it."""

from collections.abc import Sequence

USAGE = """\
usage: areno launch FILE.yaml [key=value ...]

Prints what 'areno run' with the same arguments would start on a cluster, without starting it. With
scheduler.type=slurm, the output is the batch script; with scheduler.type=ray, the resources to reserve.
"""


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    words = list(argv)
    if not words or words in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    if not words[0].startswith("-") and "=" not in words[0]:
        words.insert(0, "--config")
    from areno.experiments.launch_text import launch_text

    print(launch_text(words), end="")
    return 0
