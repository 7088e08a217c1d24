"""Checks that the files, functions and packages of an experiment exist, before a model is loaded."""

from collections.abc import Callable, Iterator
from typing import Any

from areno.config.experiment.experiments import BaseExperimentConfig, PPOConfig
from areno.config.experiment.generation_sections import AgentConfig
from areno.config.experiment.path_checks import DATASETS, path_problems
from areno.config.experiment.run_sections import LOADER
from areno.config.hooks import named_function, named_object
from areno.config.options import nearest
from areno.config.packages import missing_packages
from areno.config.parser import Problems
from areno.config.tracking import SERVICES, service_problem
from areno.errors import UsageError
from areno.text.reasoning import list_reasoning_parsers
from areno.text.tool_calls import list_tool_call_parsers


def check_inputs(config: BaseExperimentConfig) -> None:
    """Check that models, data, functions and packages exist, and that ``cluster.fileroot`` is writable.

    Raises:
        UsageError: at least one check failed; the message lists all problems.
    """
    Problems.raise_all((*path_problems(config), *function_problems(config), *package_problems(config)))


NO_REWARD = (
    "reward.fn is missing; set reward.fn to a reward function (file.py:NAME or module.NAME), or set reward.path to a reward "
    "model"
)
"""Error message if a built-in workflow has no reward."""


def function_problems(config: BaseExperimentConfig) -> Iterator[str]:
    """Yield an error message for each problem with the configured functions, classes and reward weights.

    Also yield an empty string for each function or class without a problem; :meth:`Problems.raise_all` ignores it.
    """
    for name in DATASETS:
        section = getattr(config, name)
        if section is not None and (loader := section.dataset_kwargs.get(LOADER)):
            yield _problem(loader, f"{name}.dataset_kwargs.{LOADER}")
    if not isinstance(config, PPOConfig):
        return
    workflow, agent, reward = config.workflow_section, config.rollout.agent.agent_cls_path, config.reward_section
    if agent:
        yield _problem(agent, "rollout.agent.agent_cls_path", named_object)
    elif not config.built_in_workflow:
        yield _problem(workflow.path, "workflow.path", named_object)
    elif reward.fn:
        yield _problem(reward.fn, "reward.fn")
    elif not reward.path:
        yield NO_REWARD
    if not config.built_in_workflow and reward.weights and not reward.normalize_parts:
        yield (
            "reward.weights has no effect with a custom workflow, which computes rewards itself; pass the weights to the "
            "AsyncReward of the workflow"
        )
    if workflow.dynamic_filter_fn:
        yield _problem(workflow.dynamic_filter_fn, "workflow.dynamic_filter_fn")


def parser_problems(agent: AgentConfig) -> Iterator[str]:
    """Yield a problem for each unknown parser of tool calls or of reasoning."""
    for name, parsers in {
        "tool_call_parser": list_tool_call_parsers(),
        "reasoning_parser": list_reasoning_parsers(),
    }.items():
        value = getattr(agent, name)
        if value not in ("auto", *parsers) and value.replace("-", "_") not in parsers:
            near = nearest(value, parsers)
            yield f"rollout.agent.{name} {value!r} is unknown{near}; choose one of auto, {', '.join(parsers)}"


def package_problems(config: BaseExperimentConfig) -> Iterator[str]:
    """Yield a problem for each unknown tool-call or reasoning parser, missing package, and missing login to a tracking service.

    The check avoids slow imports.
    """
    if isinstance(config, PPOConfig):
        yield from parser_problems(config.rollout.agent)
        if config.rollout.agent.agent_cls_path and (missing := missing_packages("serve")):
            yield f"agents need {missing}"
    for name in SERVICES:
        section = getattr(config.stats_logger, name)
        mode = "online" if section.mode is True else section.mode
        if mode in ("disabled", False, None):
            continue
        login = {"key": section.wandb_api_key, "address": section.wandb_base_url} if name == "wandb" else {}
        if problem_and_remedy := service_problem(name, mode, **login):
            yield f"stats_logger.{name}.mode={mode} {problem_and_remedy}, or set stats_logger.{name}.mode=disabled"


def _problem(name: Any, option: str, resolve: Callable[..., Any] = named_function) -> str:
    try:
        resolve(name, option=option)
    except UsageError as error:
        return str(error)
    return ""
