"""``areno quickstart``: the embedded default run."""

from collections.abc import Sequence

from areno.config.parser import TypedParser


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = TypedParser(
        prog="areno quickstart",
        description="Make a tiny model and a toy task on the spot, teach it by SFT and then by GSPO, and measure it. "
        "Takes about two minutes on two CPU cores; needs no network.",
        allow_abbrev=False,
    )
    parser.add_argument("--seed", type=int, default=0, help="Fixes data, weights and samples. Default: 0.")
    parser.add_argument("--run-dir", help="Folder for everything of the run. Default: runs/quickstart-<time>.")
    arguments = parser.parse_args(argv)
    from areno.quickstart.run import quickstart

    quickstart(arguments.seed, arguments.run_dir)
    return 0
