"""Workflows and functions as users name them: an object, a class, ``package.module.Name`` or ``file.py:Name``."""

import inspect
from collections.abc import Callable
from typing import Any

from areno.config.experiment.generation_sections import AgentConfig
from areno.config.hooks import named_object
from areno.errors import UsageError
from areno.rollouts.engine_client import GenerationSettings
from areno.rollouts.workflows.agents import DEFAULTS, AgentWorkflow, is_agent
from areno.rollouts.workflows.base import GroupedRolloutWorkflow, RolloutWorkflow
from areno.rollouts.workflows.sending import name_of


def resolve_workflow(
    workflow: Any,
    gconfig: GenerationSettings,
    *,
    workflow_kwargs: dict[str, Any] | None = None,
    offered: dict[str, Any] | None = None,
    agent: AgentConfig = DEFAULTS,
    model_name: str = "default",
    n_samples: int = 1,
    drop_incomplete: bool = False,
) -> RolloutWorkflow:
    """The workflow of an experiment, in groups of ``n_samples``, see :class:`GroupedRolloutWorkflow`.

    Args:
        workflow: a workflow or an agent: an object, a class, or the name of either.
        gconfig: sampling of agents; workflows of other kinds get theirs through ``workflow_kwargs``.
        workflow_kwargs: arguments of a class.
        offered: further ones, which it gets as far as it takes them.
        agent: how an agent is run; ``model_name`` is the model's in its requests.

    Raises:
        UsageError: it is neither, cannot be found, or does not take the arguments.
    """
    found = named_object(workflow, option="workflow") if isinstance(workflow, str) else workflow
    if inspect.isclass(found):
        taken = inspect.signature(found).parameters
        more = {name: value for name, value in (offered or {}).items() if name in taken}
        try:
            found = found(**more | (workflow_kwargs or {}))
        except TypeError as error:
            raise UsageError(f"workflow {name_of(found)} cannot be made with workflow_kwargs: {error}") from error
    elif workflow_kwargs:
        names = ", ".join(workflow_kwargs)
        raise UsageError(
            f"workflow_kwargs ({names}) have no effect: {name_of(found)} is an object already; give its class"
        )
    if not hasattr(found, "arun_episode"):
        if not is_agent(found):
            raise UsageError(
                f"workflow {name_of(found)} has neither `async def arun_episode(self, engine, data)` nor `async def run(self, "
                "data, **extra)`"
            )
        found = AgentWorkflow(found, gconfig, agent, model_name)
    return GroupedRolloutWorkflow(found, n_samples, drop_incomplete)


def resolve_function(function: Callable[..., Any] | str | None, option: str) -> Callable[..., Any] | None:
    """A filter or another function, as itself or by name; None stays None.

    Raises UsageError: what ``option`` names cannot be found, or cannot be called.
    """
    found = named_object(function, option=option) if isinstance(function, str) else function
    if found is not None and not callable(found):
        raise UsageError(f"{option} is a {type(found).__name__}; give a function, or its name")
    return found
