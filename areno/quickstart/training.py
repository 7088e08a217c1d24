"""Code that the quickstarts ``from_scratch`` and ``pretrained`` share.

The code chooses the run folder, prints the ``areno train`` command, and trains.
"""

import logging
import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from areno.config.paths import unwritable
from areno.config.prepare import prepare_run
from areno.errors import UsageError
from areno.observability.display import PlainProgress, ProgressDisplay, create_progress
from areno.observability.screen import ShownSample

_LINE_EVERY_S = 5.0


class BriefLines(PlainProgress):
    """Progress in piped output: a line every few seconds instead of a line per step."""

    def __init__(self) -> None:
        super().__init__()
        self._printed = 0.0

    def step_done(
        self,
        step: int,
        stats: Mapping[str, float],
        sample: ShownSample | None = None,
        parts: Mapping[str, float] | None = None,
    ) -> None:
        """Print a line at the last step, and otherwise at most every few seconds."""
        super().step_done(step, stats, sample, parts)
        now = time.monotonic()
        if now - self._printed < _LINE_EVERY_S and step + 1 < self.total_steps:
            return
        self._printed = now
        reward = f"  reward {stats['reward_mean']:.2f}" if "reward_mean" in stats else ""
        length = f"  tokens per answer {stats['response_len']:.0f}" if "response_len" in stats else ""
        loss = "" if reward else f"  loss {stats['loss']:.3f}"
        print(f"     step {step + 1:3d}/{self.total_steps}{loss}{reward}{length}")


def run_folder(run_dir: str | None) -> Path:
    """Print and return the run's folder (default ``runs/quickstart-<time>``).

    Raises UsageError if the folder is not empty or not writable.
    """
    root = Path(run_dir or f"runs/quickstart-{datetime.now():%Y%m%d-%H%M%S}")
    if problem := unwritable(root, "--run-dir"):
        raise UsageError(problem)
    if root.exists() and any(root.iterdir()):
        raise UsageError(f"--run-dir {root}: the folder is not empty; choose another folder, or delete this one")
    print(f"Output folder: {root}\n")
    return root


def train(settings: Mapping[str, object]) -> Path:
    """Train with ``settings``, the options of ``areno train``, and return the folder of the last checkpoint.

    The ``areno train`` command with these options is printed, but the training runs in this process. If the training fails,
    the process exits.
    """
    from areno.api.run_training import run_training

    argv = [str(part) for pair in settings.items() for part in pair]
    _print_command(argv)
    run = prepare_run(argv)
    live = create_progress()
    progress: ProgressDisplay = BriefLines() if isinstance(live, PlainProgress) else live
    logging.getLogger("areno.quickstart").debug("running %s", argv)
    code = run_training(run.options, loader_fn=run.loader_fn, progress=progress, console_level="WARNING")
    if code:
        raise SystemExit(code)
    checkpoint = run.options.checkpoint_path
    return sorted(checkpoint.glob("step_*"))[-1]


def _print_command(argv: Sequence[str]) -> None:
    """Print the command, wrapped for pasting into a shell."""
    line = "     $ areno train"
    for flag, value in zip(argv[::2], argv[1::2], strict=True):
        part = f" {flag} {shlex.quote(value)}"
        if len(line) + len(part) > 110:
            print(line + " \\")
            line = "        "
        line += part
    print(line)
