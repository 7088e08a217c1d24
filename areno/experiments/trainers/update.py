"""One policy update: what rows are scored with, how rewards become advantages, and the optimizer steps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from areno.config.experiment.engine_sections import PPOActorConfig, TeacherConfig
from areno.config.experiment.experiments import PPOConfig
from areno.config.experiment.update_sections import NormConfig, RejectionSamplingConfig
from areno.errors import UsageError
from areno.loss_fns.family import PolicyLoss
from areno.loss_fns.norm import Norm
from areno.loss_fns.proximal import divergences
from areno.loss_fns.rejection import RejectionSampling
from areno.loss_fns.shaping import RewardShaping
from areno.rollouts.trajectory import Trajectory
from areno.types import ModelRole, TrainSequence

REF, CRITIC, TEACHER = "ref", "critic", "teacher"


def roles_of(config: PPOConfig, optimizer: Any) -> dict[str, ModelRole]:
    """The models besides the actor: a reference where there is a KL to it, a critic, a teacher."""
    roles = {}
    if config.ref is not None and config.actor.kl_ctl > 0:
        roles[REF] = ModelRole(REF, config.ref.path, trainable=False)
    if config.critic is not None:
        roles[CRITIC] = ModelRole(CRITIC, config.critic.path, trainable=True, kind="value", optimizer=optimizer)
    if config.teacher is not None:
        roles[TEACHER] = ModelRole(TEACHER, config.teacher.path, trainable=False)
    return roles


def policy_loss_of(actor: PPOActorConfig, teacher: TeacherConfig | None) -> PolicyLoss:
    """The knobs of the loss."""
    level: Any = actor.importance_sampling_level
    method: Any = actor.prox_logp_method
    return PolicyLoss(
        eps_clip=actor.eps_clip,
        eps_clip_higher=actor.eps_clip_higher,
        c_clip=actor.c_clip,
        importance_sampling_level=level,
        use_sapo_loss=actor.use_sapo_loss,
        sapo_tau_pos=actor.sapo_tau_pos,
        sapo_tau_neg=actor.sapo_tau_neg,
        use_cispo_loss=actor.use_cispo_loss,
        use_decoupled_loss=actor.use_decoupled_loss,
        prox_logp_method=method,
        rejection_sampling=_rejection(actor.rejection_sampling),
        m2_threshold=actor.m2_threshold,
        rl_loss_weight=1.0 if teacher is None else teacher.rl_loss_weight,
        distill_loss_weight=0.0 if teacher is None else teacher.distill_loss_weight,
    )


def _rejection(given: RejectionSamplingConfig | None) -> RejectionSampling | None:
    if given is None:
        return None
    names: dict[str, Any] = {name: getattr(given, name) for name in ("level", "action", "metric", "agg", "upper")}
    # A clamp without a lower bound has 0 in the configuration, where no ratio lies below; a k1 of 0 is a bound.
    unbounded = given.metric == "ratio" and given.lower == 0
    return RejectionSampling(**names, lower=None if unbounded else given.lower)


def shaping_of(actor: PPOActorConfig) -> RewardShaping:
    """The way from task rewards to advantages."""
    estimator: Any = actor.kl_estimator
    return RewardShaping(
        reward_bias=actor.reward_bias,
        reward_scaling=actor.reward_scaling,
        reward_clip=actor.reward_clip,
        overlong_reward_penalty=actor.overlong_reward_penalty,
        overlong_tokens=actor.overlong_tokens,
        overlong_penalty_factor=actor.overlong_penalty_factor,
        max_new_tokens=actor.max_new_tokens,
        mask_no_eos_with_zero=actor.mask_no_eos_with_zero,
        reward_norm=_norm(actor.reward_norm),
        kl_ctl=actor.kl_ctl,
        kl_estimator=estimator,
        discount=actor.discount,
        gae_lambda=actor.gae_lambda,
        adv_norm=_norm(actor.adv_norm),
    )


def _norm(given: NormConfig | None) -> Norm | None:
    if given is None:
        return None
    mean, std = given.mean_level, given.std_level
    levels: dict[str, Any] = {"mean_level": mean, "std_level": std}
    return Norm(**levels, mean_leave1out=given.mean_leave1out, std_unbiased=given.std_unbiased, eps=given.eps)


def minibatches(rows: Sequence[TrainSequence], count: int) -> list[list[TrainSequence]]:
    """Rows of each optimizer step of an update, as equally many as can be; at most one step per row."""
    count = max(min(count, len(rows)), 1)
    bounds = [len(rows) * index // count for index in range(count + 1)]
    return [list(rows[first:last]) for first, last in itertools.pairwise(bounds)]


def proximal_statistics(rows: Sequence[TrainSequence]) -> dict[str, float]:
    """How far the policy before the update is from the one that sampled, as means over the trained tokens.

    Args:
        rows: with ``logprobs`` and ``prox_logprobs``.
    """
    pairs = [
        (row.logprobs[i], row.prox_logprobs[i]) for row in rows for i, counts in enumerate(row.trainable()) if counts
    ]
    if not pairs:
        return {}
    behaviour, proximal = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    return {f"compute_logp/{name}/avg": float(x.mean()) for name, x in divergences(behaviour, proximal).items()}


def with_version(loss: Any, knobs: PolicyLoss, version: int) -> Any:
    """The loss of an update that makes ``version``."""
    return functools.partial(loss, knobs=knobs, version=version)


def turns_of(trajectories: Sequence[Trajectory]) -> list[float]:
    """Answers of the model in the episode of each row, as far as workflows say it."""
    return [float(count) for t in trajectories if "num_turns" in t for count in t["num_turns"]]


def told_by_workflows(trajectories: Sequence[Trajectory], key: str) -> list[float]:
    """What workflows have returned under a key of their own, one number per entry.

    Raises:
        UsageError: none of the trajectories has it.
    """
    found = [torch.as_tensor(t[key], dtype=torch.float64).flatten() for t in trajectories if key in t]
    if trajectories and not found:
        names = ", ".join(sorted(set().union(*trajectories)))
        raise UsageError(f"actor.log_agent_stats_keys {key!r} is in no trajectory; they have {names}")
    return torch.cat(found).tolist() if found else []
