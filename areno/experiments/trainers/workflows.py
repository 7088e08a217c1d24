"""Creates the workflow and the trajectory filter of an experiment from its configuration."""

from collections.abc import Callable
from typing import Any

from areno.config.experiment.experiments import PPOConfig
from areno.config.hooks import named_function
from areno.errors import UsageError
from areno.experiments.checks import NO_REWARD
from areno.rollouts.trajectory import Trajectory
from areno.rollouts.workflows.base import RolloutWorkflow
from areno.rollouts.workflows.multi_turn import MultiTurnWorkflow
from areno.rollouts.workflows.resolve import resolve_workflow
from areno.rollouts.workflows.rewards import AsyncReward
from areno.rollouts.workflows.rlvr import RLVRWorkflow

_WORKFLOWS = {"rlvr": RLVRWorkflow, "multi_turn": MultiTurnWorkflow}


def workflow_of(
    config: PPOConfig, workflow: Any, kwargs: dict[str, Any] | None, tokenizer: Any, *, evaluates: bool = False
) -> RolloutWorkflow:
    """Return the workflow of an experiment, which samples a group of ``gconfig.n_samples`` answers to each row.

    ``workflow`` is an object, a class (with ``kwargs``), or a name. If ``workflow`` is None, the configured agent is
    used. If there is no agent either, the ``workflow`` section is used. With ``evaluates``, ``eval_gconfig`` replaces
    ``gconfig`` if ``eval_gconfig`` is set.
    """
    gconfig = config.eval_gconfig if evaluates and config.eval_gconfig is not None else config.gconfig
    agent = config.rollout.agent
    if workflow is None:
        section = config.workflow_section
        workflow, kwargs = section.path, {**section.kwargs, **(kwargs or {})}
        if agent.agent_cls_path:
            workflow, kwargs = agent.agent_cls_path, kwargs or None
    if isinstance(workflow, str) and workflow in _WORKFLOWS:
        workflow, kwargs = _WORKFLOWS[workflow], {"reward_fn": _reward_call(config), **(kwargs or {})}
    return resolve_workflow(
        workflow,
        gconfig,
        workflow_kwargs=kwargs or None,
        offered={"gconfig": gconfig, "tokenizer": tokenizer},
        agent=agent,
        model_name=gconfig.lora_name if config.actor.use_lora else "default",
        n_samples=gconfig.n_samples,
    )


def _reward_call(config: PPOConfig) -> AsyncReward | None:
    """Return the reward function of built-in workflows; None if a reward model computes the rewards."""
    reward = config.reward_section
    if reward.path:
        return None
    if not reward.fn:
        raise UsageError(NO_REWARD)
    return AsyncReward(
        reward.fn,
        timeout_seconds=reward.timeout_seconds,
        max_retries=reward.max_retries,
        max_workers=reward.max_workers,
        weights=reward.weights,
    )


def filter_of(config: PPOConfig, filter_fn: Any) -> Callable[[Trajectory], bool] | None:
    """Return a filter of groups of samples; None if neither a filter function nor a bound is configured.

    A group passes if the filter function accepts it, and if its mean reward is within the bounds ``success_rate_lb`` and
    ``success_rate_ub``. The filter function is ``filter_fn`` or, if this is None, the one of the ``workflow`` section.
    """
    function = filter_fn or config.workflow_section.dynamic_filter_fn
    accept = named_function(function, option="workflow.dynamic_filter_fn") if function else None
    low, high = config.success_rate_lb, config.success_rate_ub
    if low is None and high is None:
        return accept

    def within(trajectory: Trajectory) -> bool:
        rate = float(trajectory["rewards"].float().mean())
        fits = (low is None or rate >= low) and (high is None or rate <= high)
        return fits and (accept is None or accept(trajectory))

    return within
