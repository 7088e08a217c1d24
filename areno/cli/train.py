"""``areno train``: parse, merge with the resumed run, validate, load the hooks, print the summary, train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from areno.config.algorithms import get_algorithm
from areno.config.hooks import load_hook
from areno.config.parser import parse_train, train_help
from areno.config.resume import apply_resume
from areno.config.summary import format_summary
from areno.config.train_options import TrainOptions
from areno.config.validate import LOADER_HOOK, REWARD_HOOK, validate
from areno.config.yaml_io import dump_config

_LOADER_KEYWORDS = ("default_loader", "load_dataset", "load_from_disk")


def run(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: arguments after ``train``.

    Returns:
        The exit code.

    Raises:
        UsageError: the input cannot work.
    """
    if "-h" in argv or "--help" in argv:
        print(train_help(argv), end="")
        return 0
    options = apply_resume(parse_train(argv))
    validate(options)
    loader_fn, reward_fn = load_hooks(options)
    print(format_summary(options, get_algorithm(options.algo)), flush=True)
    if options.dry_run:
        return _dry_run(options)
    from areno.api.run import run_training

    return run_training(options, reward_fn=reward_fn, loader_fn=loader_fn)


def load_hooks(options: TrainOptions) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """Import the user's data set loader and reward function, where given, and check their signatures.

    Returns:
        Loader and reward function.

    Raises:
        UsageError: a file or its function cannot be used.
    """
    loader = options.dataset_loader_fn and load_hook(
        options.dataset_loader_fn, positional=1, keywords=_LOADER_KEYWORDS, **LOADER_HOOK
    )
    reward = options.reward_fn_path and load_hook(options.reward_fn_path, positional=1, **REWARD_HOOK)
    return loader or None, reward or None


def _dry_run(options: TrainOptions) -> int:
    from areno.engine.plan.estimate import estimate_memory_text

    print("\nResolved configuration\n----------------------")
    print(dump_config(options), end="")
    print("\nMemory\n------")
    print(estimate_memory_text(options))
    return 0
