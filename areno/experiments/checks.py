"""What an experiment's configuration names is looked up before a model is loaded: all problems in one message."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from netrc import NetrcParseError, netrc
from typing import Any
from urllib.parse import urlparse

from areno.config.experiment.experiments import BaseExperimentConfig, PPOConfig
from areno.config.experiment.generation_sections import AgentConfig
from areno.config.experiment.idle_checks import LOADER
from areno.config.experiment.places import DATASETS, place_problems
from areno.config.hooks import named_object
from areno.config.options import nearest
from areno.config.packages import install_command, missing_server_packages
from areno.config.parser import Problems
from areno.errors import UsageError
from areno.text.reasoning import list_reasoning_parsers
from areno.text.tool_calls import list_tool_call_parsers

BUILT_IN_WORKFLOWS = ("rlvr", "multi_turn")


def check_inputs(config: BaseExperimentConfig) -> None:
    """Check that models, data and functions are there, and that the run can be written.

    Raises:
        UsageError: every problem, with its setting, value and remedy; numbered if there are several.
    """
    problems = Problems()
    found = (*place_problems(config), *function_problems(config), *package_problems(config))
    for text in found:
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


def parser_problems(agent: AgentConfig) -> Iterator[str]:
    """Say which parsers of an agent's answers are unknown."""
    for name, known in {
        "tool_call_parser": list_tool_call_parsers(),
        "reasoning_parser": list_reasoning_parsers(),
    }.items():
        value = getattr(agent, name)
        if value not in ("auto", *known) and value.replace("-", "_") not in known:
            near = nearest(value, known)
            yield f"rollout.agent.{name} {value!r} is unknown{near}; choose auto, {', '.join(known)}"


def package_problems(config: BaseExperimentConfig) -> Iterator[str]:
    """Say which parsers are unknown, and which packages and logins are missing, without importing anything heavy."""
    if isinstance(config, PPOConfig):
        yield from parser_problems(config.rollout.agent)
        if config.rollout.agent.agent_cls_path and (missing := missing_server_packages()):
            yield f"agents need the packages {', '.join(missing)}; install them: {install_command('serve')}"
    for name in ("wandb", "swanlab", "trackio"):
        section = getattr(config.stats_logger, name)
        if section.mode not in ("disabled", False, None) and importlib.util.find_spec(name) is None:
            yield (
                f"stats_logger.{name}.mode={section.mode} needs the package {name}; install it: "
                f"{install_command('track')}, or set stats_logger.{name}.mode=disabled"
            )
    wandb = config.stats_logger.wandb
    if wandb.mode not in ("online", True) or importlib.util.find_spec("wandb") is None:
        return
    if not (wandb.wandb_api_key or has_wandb_login(wandb.wandb_base_url)):
        yield (
            "stats_logger.wandb.mode=online needs a login, and there is none: run `wandb login`, set WANDB_API_KEY, or set "
            "stats_logger.wandb.mode=offline"
        )


def has_wandb_login(address: str) -> bool:
    """Whether W&B would find a key by itself: in the environment, or where ``wandb login`` stores it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(address or os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False


def _problem(named: Any, option: str, *, callable_: bool = True) -> str:
    try:
        found = named_object(named, option=option) if isinstance(named, str) else named
    except UsageError as error:
        return str(error)
    if callable_ and not callable(found):
        return f"{option} {named!r} is a {type(found).__name__}; give a function"
    return ""
