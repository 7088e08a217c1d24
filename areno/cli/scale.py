"""``areno scale``: changes the number of rollout replicas of a run in progress."""

from collections.abc import Sequence
from pathlib import Path

from areno.config.parser import TypedParser
from areno.errors import UsageError


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = TypedParser(
        prog="areno scale",
        description="Change the number of rollout replicas of a run in progress. If neither REPLICAS nor --add is given, "
        "print the current number.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", metavar="RUN", help="The run directory. The trainer and this command must access the same directory."
    )
    parser.add_argument("replicas", metavar="REPLICAS", nargs="?", type=int, help="New number of replicas.")
    parser.add_argument(
        "--add", metavar="URL", action="append", default=[], help="Add an inference server as a replica; repeatable."
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=900.0,
        help="Maximum time to wait, in seconds (default: %(default)g).",
    )
    arguments = parser.parse_args(argv)
    from areno.rollouts.fleet.control import replicas_of, request

    folder = Path(arguments.run)
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a run directory; pass the folder that contains config.yaml (runs/<name>)")
    if arguments.replicas is not None and arguments.add:
        raise UsageError(
            "--add cannot be combined with a number of replicas; omit the number, because each --add URL adds one replica"
        )
    if arguments.replicas is not None and arguments.replicas < 1:
        raise UsageError(f"the number of replicas must be at least 1, got {arguments.replicas}")
    if arguments.replicas is None and not arguments.add:
        print(f"replicas: {replicas_of(folder)}")
        return 0
    print(f"replicas: {request(folder, arguments.replicas, arguments.add, arguments.timeout, print)}")
    return 0
