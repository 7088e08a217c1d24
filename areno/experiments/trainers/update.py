"""One policy update: what rows are scored with, how rewards become advantages, and the optimizer steps."""

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
from areno.errors import UsageError
from areno.experiments.trainers.engines import rows_at_once
from areno.loss_fns.family import PolicyLossConfig, policy_loss_fn
from areno.loss_fns.norm import Norm
from areno.loss_fns.pack import LossFn, knobs_of
from areno.loss_fns.rejection import RejectionSampling
from areno.loss_fns.shaping import RewardShaping
from areno.rollouts.servers.scorer import ServerScorer
from areno.rollouts.trajectory import Trajectory
from areno.training.objectives.policy import PolicySettings
from areno.types import ModelRole

REF, CRITIC, TEACHER, REWARD = "ref", "critic", "teacher", "reward"
T = TypeVar("T")


def roles_of(config: PPOConfig, optimizer: Any) -> dict[str, ModelRole]:
    """The models besides the actor: a reference where there is a KL to it, a critic, a teacher, a reward model."""
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
    """What becomes of rows before the optimizer steps: by which models they are scored, and how they are shaped.

    Raises UsageError: a teacher's server does not answer.
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
        scores=[score for score, wanted in scores.items() if wanted],
        scorers=scorers,
        critic=None if critic is None else CRITIC,
        reward_path=config.reward_section.path,
        recomputes=actor.recompute_logprob and not getattr(knobs_of(loss), "needs_proximal", False),
        m2_threshold=actor.m2_threshold,
    )


def loss_of(actor: PPOActorConfig, teacher: TeacherConfig | None) -> functools.partial[Any]:
    """The loss of ``actor.algorithm``, else the policy loss; its parameters are bound, but for ``version`` if it has that."""
    loss: Any = policy_loss_fn
    if actor.algorithm:
        spec, options = named_algorithm(actor)
        if not is_family(spec):
            own: Any = spec.make_loss_fn(options)
            return functools.partial(own)
        loss = spec.resolve_default_loss()
    kl = {"kl_coef": actor.kl_loss_coef, "kl_type": actor.kl_loss_type}
    return functools.partial(loss, knobs=policy_loss_of(actor, teacher), **kl)


def with_version(loss: functools.partial[Any], version: int) -> functools.partial[Any]:
    """The loss of an update that makes ``version``."""
    return functools.partial(loss, version=version) if "version" in inspect.signature(loss).parameters else loss


def policy_loss_of(actor: PPOActorConfig, teacher: TeacherConfig | None) -> PolicyLossConfig:
    """The knobs of the loss."""
    bounds = actor.rejection_sampling
    rejection = bounds and made_of(RejectionSampling, bounds)
    return made_of(PolicyLossConfig, actor, *([teacher] if teacher else []), rejection_sampling=rejection)


def shaping_of(actor: PPOActorConfig, reward: RewardConfig) -> RewardShaping:
    """The way from task rewards to advantages."""
    weights = part_weights(reward.weights) if reward.normalize_parts else None
    norms = {name: getattr(actor, name) for name in ("reward_norm", "adv_norm")}
    made = {name: norm and made_of(Norm, norm) for name, norm in norms.items()}
    return made_of(RewardShaping, actor, part_weights=weights, **made)


def made_of(cls: type[T], *sections: Any, **others: Any) -> T:
    """A dataclass whose fields take the values of the settings that have their names.

    Args:
        cls: the dataclass.
        sections: a later one goes before an earlier one.
        others: fields whose values are not those of a setting.
    """
    values = {entry.name: getattr(one, entry.name) for one in sections for entry in fields(one) if entry.init}
    own = {entry.name for entry in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in values.items() if name in own} | others)


def turns_of(trajectories: Sequence[Trajectory]) -> list[float]:
    """Answers of the model in the episode of each row, as far as workflows say it."""
    return [float(count) for t in trajectories if "num_turns" in t for count in t["num_turns"]]


def told_by_workflows(trajectories: Sequence[Trajectory], key: str) -> list[float]:
    """What workflows have returned under a key of their own, a number per entry; :class:`UsageError` if none has it."""
    found = [torch.as_tensor(t[key], dtype=torch.float64).flatten() for t in trajectories if key in t]
    if trajectories and not found:
        names = ", ".join(sorted(set().union(*trajectories)))
        raise UsageError(f"actor.log_agent_stats_keys {key!r} is in no trajectory; they have {names}")
    return torch.cat(found).tolist() if found else []
