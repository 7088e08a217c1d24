"""Prepares a run from its arguments, with all checks that are possible before any expensive work."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areno.config import hooks
from areno.config.all_train_options import TrainOptions
from areno.config.machine import resolved_device, rollout_gpu_problem, with_layout
from areno.config.packages import require_packages
from areno.config.parser import parse_train
from areno.config.resume import apply_resume
from areno.config.validate import validate
from areno.errors import UsageError
from areno.gpus import visible_gpus


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """The checked options of a run, and the user's dataset loader. ``loader_fn`` is None without a user's loader."""

    options: TrainOptions
    loader_fn: Callable[..., Any] | None


def prepare_run(argv: Sequence[str]) -> PreparedRun:
    """Parse and validate the arguments of ``areno train``, and import the user-defined functions.

    In a resumed run, options that the arguments do not set come from the old run.
    """
    options = prepare_plan(argv, needs_data=True)
    return PreparedRun(options, load_hooks(options))


def prepare_plan(argv: Sequence[str], *, needs_data: bool = False) -> TrainOptions:
    """Parse and check the arguments of ``areno plan``, which takes the options of ``areno train``.

    If ``needs_data`` is false, data and rewards may be missing. ``--device auto`` is resolved only for the checks, and is
    returned as ``auto``.
    """
    gpus = visible_gpus()
    options = with_layout(apply_resume(parse_train(argv)), gpus)
    validate(replace(options, device=resolved_device(options.device, gpus)), needs_data=needs_data)
    if problem := rollout_gpu_problem(options, gpus):
        raise UsageError(problem)
    return options


def load_hooks(options: TrainOptions) -> Callable[..., Any] | None:
    """Import all user-defined functions and the workflow, check their signatures, and return the dataset loader.

    Without a user-defined loader, return None. The reward function is imported and checked in a subprocess, because this
    process never calls it.
    """
    loader = hooks.load_hook(options.dataset_loader_fn, hooks.LOADER_HOOK) if options.dataset_loader_fn else None
    if options.reward_fn_path:
        hooks.check_hook(options.reward_fn_path, hooks.REWARD_HOOK)
    if options.eval_dataset_loader_fn:
        hooks.load_hook(options.eval_dataset_loader_fn, hooks.EVAL_LOADER_HOOK)
    if options.agent_fn:
        hooks.load_hook(options.agent_fn, hooks.AGENT_HOOK)
    if options.workflow:
        check_workflow(options.workflow)
    if ".py" in options.advantage:
        hooks.load_hook(options.advantage, hooks.ADVANTAGE_HOOK)
    return loader


def check_workflow(reference: str) -> None:
    """Import the class or object of ``--workflow``, and check its constructor and methods."""
    workflow = hooks.named_object(reference, option="--workflow")
    if inspect.isclass(workflow):
        signature = inspect.signature(workflow)
        try:
            signature.bind(**{name: None for name in ("gconfig", "tokenizer") if name in signature.parameters})
        except TypeError as error:
            raise UsageError(
                f"--workflow {reference}: areno constructs the class with only gconfig and tokenizer, which fails: "
                f"{error}; give other parameters default values"
            ) from error
    if hasattr(workflow, "arun_episode"):
        return
    if not inspect.iscoroutinefunction(getattr(workflow, "run", None)):
        raise UsageError(
            f"--workflow {reference}: the workflow has neither `async def arun_episode(self, engine, data)` nor "
            "`async def run(self, "
            "data, **extra)`; define one of them"
        )
    require_packages(
        "serve", f"--workflow {reference}: agents call the model through an HTTP server, and this server needs"
    )
