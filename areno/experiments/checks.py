"""What an experiment's configuration names is looked up before a model is loaded: all problems in one message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from areno.config.experiment.experiments import BaseExperimentConfig, PPOConfig
from areno.config.experiment.idle_checks import LOADER
from areno.config.experiment.places import DATASETS, place_problems
from areno.config.hooks import named_object
from areno.config.parser import Problems
from areno.errors import UsageError

BUILT_IN_WORKFLOWS = ("rlvr", "multi_turn")


def check_inputs(config: BaseExperimentConfig) -> None:
    """Check that models, data and functions are there, and that the run can be written.

    Raises:
        UsageError: every problem, with its setting, value and remedy; numbered if there are several.
    """
    problems = Problems()
    for text in (*place_problems(config), *function_problems(config)):
        problems.add(text)
    problems.raise_if_any()


def function_problems(config: BaseExperimentConfig) -> Iterator[str]:
    """Say which functions and classes that the configuration names cannot be found, or cannot be called."""
    for name in DATASETS:
        section = getattr(config, name)
        if section is not None and (loader := section.dataset_kwargs.get(LOADER)):
            yield _problem(loader, f"{name}.dataset_kwargs.{LOADER}")
    if not isinstance(config, PPOConfig):
        return
    workflow, agent = config.workflow_section, config.rollout.agent.agent_cls_path
    if agent:
        yield _problem(agent, "rollout.agent.agent_cls_path", callable_=False)
    elif workflow.path not in BUILT_IN_WORKFLOWS:
        yield _problem(workflow.path, "workflow.path", callable_=False)
    elif config.reward_section.fn:
        yield _problem(config.reward_section.fn, "reward.fn")
    else:
        yield "reward.fn is missing: name the reward function as file.py:NAME or module.NAME"
    if workflow.dynamic_filter_fn:
        yield _problem(workflow.dynamic_filter_fn, "workflow.dynamic_filter_fn")


def _problem(named: Any, option: str, *, callable_: bool = True) -> str:
    try:
        found = named_object(named, option=option) if isinstance(named, str) else named
    except UsageError as error:
        return str(error)
    if callable_ and not callable(found):
        return f"{option} {named!r} is a {type(found).__name__}; give a function"
    return ""
