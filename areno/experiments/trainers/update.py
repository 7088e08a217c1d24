"""Turns settings into the parts of a policy update: the models that score rows, the reward shaping, and the loss."""

import functools
import inspect
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch

from areno.config.experiment.engine_sections import PPOActorConfig, TeacherConfig
from areno.config.experiment.experiments import PPOConfig
from areno.config.experiment.named_algorithm import is_family, named_algorithm
from areno.config.experiment.run_sections import RewardConfig
from areno.config.paths import is_address
from areno.config.reward_weights import part_weights
from areno.engine.engine import ACTOR
from areno.errors import UsageError, first_line
from areno.experiments.trainers.engines import rows_at_once
from areno.loss_fns.loss_interface import LossFn, knobs_of
from areno.loss_fns.norm import Norm
from areno.loss_fns.policy_loss import PolicyLossConfig, policy_loss_fn
from areno.loss_fns.rejection import RejectionSampling
from areno.loss_fns.shaping import RewardShaping
from areno.rollouts.servers.scorer import ServerScorer
from areno.rollouts.trajectory import Trajectory
from areno.training.objectives.policy import PolicySettings
from areno.types import ModelRole

REF, CRITIC, TEACHER, REWARD = "ref", "critic", "teacher", "reward"
T = TypeVar("T")


def roles_of(config: PPOConfig, optimizer: Any) -> dict[str, ModelRole]:
    """Return the configured models besides the actor: reference, critic, local teacher and reward model.

    The reference is included only if a KL term needs the reference.
    """
    roles = {}
    if config.ref is not None and config.actor.takes_reference:
        roles[REF] = ModelRole(REF, config.ref.path, trainable=False)
    if config.critic is not None:
        roles[CRITIC] = ModelRole(CRITIC, config.critic.path, trainable=True, kind="value", optimizer=optimizer)
    if config.teacher is not None and not is_address(config.teacher.path):
        roles[TEACHER] = ModelRole(TEACHER, config.teacher.path, trainable=False)
    if config.reward_section.path:
        roles[REWARD] = ModelRole(REWARD, config.reward_section.path, trainable=False)
    return roles


def settings_of(config: PPOConfig, shaping: RewardShaping, loss: LossFn) -> PolicySettings:
    """Return the settings for the work before the optimizer steps: scoring the rows and shaping the rewards.

    Raises:
        UsageError: ``teacher.path`` is the address of a server that does not respond.
    """
    scorers = {}
    if config.teacher is not None and is_address(config.teacher.path):
        scorers[TEACHER] = ServerScorer(config.teacher.path, "teacher.path", config.rollout.request_timeout)
    ref, actor, critic = config.ref, config.actor, config.critic
    specs = {CRITIC: critic and critic.mb_spec, REF: ref and ref.mb_spec}
    scores = {
        (REF, "ref_logprobs"): ref is not None and actor.takes_reference,
        (TEACHER, "teacher_logprobs"): config.teacher is not None,
        (ACTOR, "prox_logprobs"): actor.recompute_logprob or getattr(knobs_of(loss), "needs_proximal", False),
    }

    def rows_of(role: str, rows: Sequence[Sequence[int]]) -> int:
        return rows_at_once(specs.get(role) or actor.mb_spec, max(map(len, rows), default=0))

    return PolicySettings(
        shaping=shaping,
        rows_at_once=rows_of,
        scores=[score for score, needed in scores.items() if needed],
        scorers=scorers,
        critic=None if critic is None else CRITIC,
        reward_path=config.reward_section.path,
        recomputes=actor.recompute_logprob and not getattr(knobs_of(loss), "needs_proximal", False),
        m2_threshold=actor.m2_threshold,
    )


def loss_of(actor: PPOActorConfig, teacher: TeacherConfig | None) -> functools.partial[Any]:
    """Return the loss with its options bound: the loss of ``actor.algorithm``, or the policy loss if no algorithm is set."""
    loss: Any = policy_loss_fn
    if actor.algorithm:
        spec, options = named_algorithm(actor)
        if not is_family(spec):
            custom: Any = spec.make_loss_fn(options)
            return functools.partial(custom)
        loss = spec.resolve_default_loss()
    kl = {"kl_coef": actor.kl_loss_coef, "kl_type": actor.kl_loss_type}
    return functools.partial(loss, knobs=policy_loss_of(actor, teacher), **kl)


def with_version(loss: functools.partial[Any], version: int) -> functools.partial[Any]:
    """Return the loss with its parameter ``version`` bound to the weight version that the update produces.

    A loss without this parameter is returned unchanged.
    """
    return functools.partial(loss, version=version) if "version" in inspect.signature(loss).parameters else loss


def policy_loss_of(actor: PPOActorConfig, teacher: TeacherConfig | None) -> PolicyLossConfig:
    """Return the options of the policy loss from the settings of the actor and the teacher."""
    bounds = actor.rejection_sampling
    rejection = bounds and from_settings(RejectionSampling, bounds)
    return from_settings(PolicyLossConfig, actor, *([teacher] if teacher else []), rejection_sampling=rejection)


def shaping_of(actor: PPOActorConfig, reward: RewardConfig) -> RewardShaping:
    """Return the reward shaping of an experiment."""
    weights = part_weights(reward.weights) if reward.normalize_parts else None
    sections = {name: getattr(actor, name) for name in ("reward_norm", "adv_norm")}
    norms = {name: section and from_settings(Norm, section) for name, section in sections.items()}
    return from_settings(RewardShaping, actor, part_weights=weights, **norms)


def from_settings(cls: type[T], *sections: Any, **others: Any) -> T:
    """Create an instance of the dataclass ``cls``. Settings determine the values of the fields with the same names.

    Args:
        cls: dataclass.
        sections: sections with the settings. A later section overrides an earlier section.
        others: values of other fields.
    """
    values = {
        entry.name: getattr(section, entry.name) for section in sections for entry in fields(section) if entry.init
    }
    names = {entry.name for entry in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in values.items() if name in names} | others)


def turns_of(trajectories: Sequence[Trajectory]) -> list[float]:
    """For each row of the trajectories, return the number of model turns in the episode that produced the row.

    Trajectories whose workflow does not report turns are omitted.
    """
    return [float(count) for t in trajectories if "num_turns" in t for count in t["num_turns"]]


def workflow_values(trajectories: Sequence[Trajectory], key: str, *, required: bool) -> list[float]:
    """Return the numbers that workflows returned under the custom key ``key``.

    Raises:
        UsageError: a value is not a number, or ``required`` is set and no trajectory has the key.
    """
    try:
        values = [torch.as_tensor(t[key], dtype=torch.float64).flatten() for t in trajectories if key in t]
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"actor.log_agent_stats_keys: the values of {key!r} are not numbers ({first_line(error)}); remove the key"
        ) from error
    if required and trajectories and not values:
        names = ", ".join(sorted(set().union(*trajectories)))
        raise UsageError(f"actor.log_agent_stats_keys: no trajectory has the key {key!r}; use one of the keys {names}")
    return torch.cat(values).tolist() if values else []
