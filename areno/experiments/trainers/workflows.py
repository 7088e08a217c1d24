"""From the configuration of an experiment to the workflow of its episodes, and to the filter of their trajectories."""

from collections.abc import Callable
from typing import Any

from areno.config.experiment.experiments import PPOConfig
from areno.errors import UsageError
from areno.experiments.checks import NO_REWARD
from areno.rollouts.trajectory import Trajectory
from areno.rollouts.workflows.base import RolloutWorkflow
from areno.rollouts.workflows.multi_turn import MultiTurnWorkflow
from areno.rollouts.workflows.resolve import resolve_function, resolve_workflow
from areno.rollouts.workflows.rewards import AsyncReward
from areno.rollouts.workflows.rlvr import RLVRWorkflow

_WORKFLOWS = {"rlvr": RLVRWorkflow, "multi_turn": MultiTurnWorkflow}


def workflow_of(
    config: PPOConfig, given: Any, kwargs: dict[str, Any] | None, tokenizer: Any, *, evaluates: bool = False
) -> RolloutWorkflow:
    """The workflow of an experiment, in groups of ``gconfig.n_samples``.

    ``given`` is an object, a class, for which ``kwargs`` are, or a name; None takes the ``workflow`` section. One that
    ``evaluates`` samples as ``eval_gconfig`` says.
    """
    gconfig = config.eval_gconfig if evaluates and config.eval_gconfig is not None else config.gconfig
    agent = config.rollout.agent
    named = given
    if given is None:
        section = config.workflow_section
        named, kwargs = section.path, {**section.kwargs, **(kwargs or {})}
        if agent.agent_cls_path:
            named, kwargs = agent.agent_cls_path, kwargs or None
    if isinstance(named, str) and named in _WORKFLOWS:
        named, kwargs = _WORKFLOWS[named], {"reward_fn": _reward_call(config), **(kwargs or {})}
    return resolve_workflow(
        named,
        gconfig,
        workflow_kwargs=kwargs or None,
        offered={"gconfig": gconfig, "tokenizer": tokenizer},
        agent=agent,
        model_name=gconfig.lora_name if config.actor.use_lora else "default",
        n_samples=gconfig.n_samples,
    )


def _reward_call(config: PPOConfig) -> AsyncReward | None:
    """The reward function of the workflows that come with areno; None where a reward model judges."""
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


def filter_of(config: PPOConfig, given: Any) -> Callable[[Trajectory], bool] | None:
    """The filter that was given or that the ``workflow`` section names, and the band of success rates."""
    named = given or config.workflow_section.dynamic_filter_fn or None
    accept = resolve_function(named, "workflow.dynamic_filter_fn")
    low, high = config.success_rate_lb, config.success_rate_ub
    if low is None and high is None:
        return accept

    def within(trajectory: Trajectory) -> bool:
        rate = float(trajectory["rewards"].float().mean())
        fits = (low is None or rate >= low) and (high is None or rate <= high)
        return fits and (accept is None or accept(trajectory))

    return within
