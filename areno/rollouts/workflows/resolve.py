"""Resolves workflows that are given as an object, a class or a name.

Names have the form ``package.module.Name`` or ``file.py:Name``.
"""

import inspect
from typing import Any

from areno.config.experiment.generation_sections import AgentConfig
from areno.config.hooks import named_object
from areno.errors import UsageError
from areno.rollouts.engine_client import GenerationSettings
from areno.rollouts.workflows.agents import DEFAULTS, AgentWorkflow, is_agent
from areno.rollouts.workflows.base import GroupedRolloutWorkflow, RolloutWorkflow
from areno.rollouts.workflows.pickling import name_of


def resolve_workflow(
    workflow: Any,
    gconfig: GenerationSettings,
    *,
    workflow_kwargs: dict[str, Any] | None = None,
    offered: dict[str, Any] | None = None,
    agent: AgentConfig = DEFAULTS,
    model_name: str = "default",
    n_samples: int = 1,
) -> RolloutWorkflow:
    """Return a :class:`GroupedRolloutWorkflow`, which combines ``n_samples`` samples of each data row into a group.

    Args:
        workflow: workflow or agent, given as an object, a class, or the name of an object or class.
        gconfig: sampling settings of agents. Workflows get settings through ``workflow_kwargs`` and ``offered``.
        workflow_kwargs: keyword arguments of the class; an error if ``workflow`` is an object.
        offered: further keyword arguments, of which the class gets only those that it declares.
        agent: agent options.
        model_name: model name in an agent's requests.

    Raises:
        UsageError: ``workflow`` is neither a workflow nor an agent, cannot be found, or does not accept the arguments.
    """
    if isinstance(workflow, str):
        workflow = named_object(workflow, option="workflow")
    if inspect.isclass(workflow):
        signature = inspect.signature(workflow)
        arguments = {name: value for name, value in (offered or {}).items() if name in signature.parameters}
        arguments |= workflow_kwargs or {}
        try:
            signature.bind(**arguments)
        except TypeError as error:
            if workflow_kwargs:
                raise UsageError(f"workflow {name_of(workflow)} does not accept workflow_kwargs: {error}") from error
            raise UsageError(
                f"workflow {name_of(workflow)} cannot be created: {error}; give the argument a default value in the class"
            ) from error
        workflow = workflow(**arguments)
    elif workflow_kwargs:
        names = ", ".join(workflow_kwargs)
        raise UsageError(
            f"workflow_kwargs ({names}) have no effect: {name_of(workflow)} is an instance; give its class instead"
        )
    if not hasattr(workflow, "arun_episode"):
        if not is_agent(workflow):
            raise UsageError(
                f"workflow {name_of(workflow)} has neither `async def arun_episode(self, engine, data)` nor `async def "
                "run(self, data, **extra)`; define one of these methods"
            )
        workflow = AgentWorkflow(workflow, gconfig, agent, model_name)
    return GroupedRolloutWorkflow(workflow, n_samples)
