"""PPO: training of a policy and a critic (Schulman et al. 2017, arXiv:1707.06347).

With the critic's values, one reward per response becomes one advantage per token (GAE). The stages of a step: samples ->
rewards -> reference log-probs and values -> advantages and returns -> update of the critic -> update of the policy. The
old log-probs are not recomputed, because the rollout records them.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from areno.api.trainers.base import optimizer_settings
from areno.api.trainers.rollout_trainer import RolloutTrainer
from areno.loss_fns import whiten
from areno.loss_fns.shaping import RewardShaping, trained_values
from areno.observability import log_lines
from areno.observability.scalars import summary_statistics
from areno.training.objectives.passes import Learner
from areno.training.objectives.policy import Prepared
from areno.types import ModelRole, TrainSequence

logger = logging.getLogger("areno.api.trainers.ppo.PPODatasetTrainer")


class PPODatasetTrainer(RolloutTrainer):
    """Trains a policy and a critic. Advantages are computed from the critic's values (GAE); see :class:`TrainingLoop`."""

    logger = logger
    role: ClassVar[log_lines.Role] = "actor"

    def roles(self) -> list[ModelRole]:
        """Return the critic and, if the run uses a KL term or a KL reward, the reference model."""
        return [*([self.reference_role()] if self.config.takes_reference(ppo=True) else []), self._critic_role()]

    def _critic_role(self) -> ModelRole:
        config = self.config
        optimizer = optimizer_settings(config, "critic_")
        return ModelRole("critic", str(config.critic_ckpt or config.ckpt), True, optimizer=optimizer)

    def shaping(self) -> RewardShaping:
        """Return the settings for computing advantages from rewards and the critic's values with GAE."""
        config = self.config
        return RewardShaping(
            reward_clip=math.inf,
            discount=config.gamma,
            gae_lambda=config.lam,
            bootstrap_truncated=config.bootstrap_truncated,
            adv_norm=_whitened if config.whiten_advantages else None,
            **self.reward_options,
        )

    def learners(self) -> list[Learner]:
        """Return the learners of the critic and of the policy. The policy's learner does nothing during the critic's warmup."""
        policy = [replace(each, first_step=self.config.critic_warmup_steps) for each in super().learners()]
        return [Learner("critic", self._train_critic, **self.passes), *policy]

    def row_statistics(self, prepared: Prepared) -> dict[str, float]:
        """Return statistics over the trained tokens. The explained variance is omitted if all returns are equal."""
        rows = prepared.rows
        values, returns = trained_values(rows, "values"), trained_values(rows, "returns")
        populations = {
            "old_logprob": trained_values(rows, "logprobs"),
            "critic_value": values,
            "return": returns,
            "gae_advantage": prepared.unnormalized,
            "normalized_advantage": trained_values(rows, "advantages"),
        }
        stats = super().row_statistics(prepared) | {"critic_value_forward_time_s": self._seconds["critic"]}
        for name, population in populations.items():
            stats |= summary_statistics(name, population)
        variance = float(np.var(returns))
        if variance > 0:
            stats["critic_explained_variance"] = 1.0 - float(np.var(np.subtract(returns, values))) / variance
        return stats

    def _train_critic(self, rows: list[TrainSequence]) -> dict[str, float]:
        config = self.config
        self._updating = True
        return self.instance.train_values(
            "critic",
            rows,
            config.mini_bs,
            config.gradient_accumulation_steps,
            cliprange_value=config.value_clip_eps,
            value_loss_coef=config.value_loss_coef,
        )

    def update_statistics(self, updates: Iterator[tuple[str, dict[str, float] | None]]) -> dict[str, float]:
        """Return the policy's statistics, and the critic's statistics with the prefix ``critic_``."""
        epoch, step = self.state.epoch, self.state.step
        merged: dict[str, float] = {}
        for role, stats in updates:
            if role == "critic" and stats is not None:
                merged |= {f"critic_{name}": value for name, value in stats.items() if not name.endswith("_time_s")}
                del merged["critic_loss"]  # equal to critic_value_loss
                merged["critic_train_time_s"] = self._seconds["train_critic"]
                log_lines.critic_value_loss(logger, epoch, step, merged["critic_value_loss"])
            elif stats is None:
                log_lines.train_skip(logger, epoch, step)
                merged |= self.instance.finish_step() | {"actor_train_skipped": 1.0}
            else:
                if "policy_train_wall_time_s" in stats:
                    stats["actor_train_wall_time_s"] = stats.pop("policy_train_wall_time_s")
                merged |= stats | {"actor_train_skipped": 0.0}
        return merged


def _whitened(values: Tensor, _: Sequence[int], mask: Sequence[bool]) -> Tensor:
    return torch.tensor(whiten([values.tolist()], [mask])[0], dtype=torch.float64)
