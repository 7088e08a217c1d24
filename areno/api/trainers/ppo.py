"""PPO: a policy and a critic (Schulman et al. 2017, arXiv:1707.06347).

Special here: the critic's values turn one reward per response into one advantage per token (GAE). One step: samples ->
rewards -> reference log-probs and values -> advantages and returns -> critic -> policy. The old log-probs are those that
the rollout recorded, which are the policy's own, so they need no forward pass.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from areno.api.trainers.rollout import RolloutTrainer, Sample, spread, trainable_values
from areno.loss_fns import whiten
from areno.loss_fns.gae import fill_gae
from areno.observability import lifecycle
from areno.types import ModelRole, TrainSequence

logger = logging.getLogger("areno.api.trainers.ppo.PPOTrainer")


class PPOTrainer(RolloutTrainer):
    """Rollout, rewards, values, GAE, critic steps, policy steps; see :class:`~areno.training.loop.TrainingLoop`."""

    logger = logger
    role: ClassVar[lifecycle.Role] = "actor"

    def roles(self) -> list[ModelRole]:
        """The critic, and the reference if there is a KL term."""
        return [*([self.reference_role()] if self.config.use_kl_loss else []), self._critic_role()]

    def _critic_role(self) -> ModelRole:
        config = self.config
        optimizer = {
            "lr": config.critic_lr,
            "min_lr": config.critic_min_lr,
            "lr_warmup_steps": config.critic_lr_warmup_steps,
            "lr_decay_steps": config.critic_lr_decay_steps,
            "lr_decay_style": config.critic_lr_decay_style,
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_eps,
            "weight_decay": config.weight_decay,
            "grad_clip_norm": config.critic_grad_clip_norm,
            "adam_8bit": config.adam_8bit,
            "offload": config.offload_optimizer,
        }
        return ModelRole("critic", str(config.critic_ckpt or config.ckpt), True, optimizer=optimizer)

    # -- rows ------------------------------------------------------------------------------------------------------

    def make_rows(self, samples: list[Sample]) -> tuple[list[TrainSequence], dict[str, float]]:
        """Rows with reference log-probs, values, returns and advantages."""
        config = self.config
        owned = [(sample, row) for sample in samples for row in self.train_rows(sample)]
        rows = [row for _, row in owned]
        stats = self.score_reference(rows) if config.use_kl_loss else {}
        values, stats["critic_value_forward_time_s"] = self._score_values(rows)
        for row, row_values in zip(rows, values, strict=True):
            bootstrap = row.truncated and config.bootstrap_truncated
            fill_returns(row, row_values, gamma=config.gamma, lam=config.lam, bootstrap=bootstrap)
        stats |= _value_stats(rows)
        if config.whiten_advantages:
            white = whiten([row.advantages for row in rows], [row.trainable() for row in rows])
            for row, advantages in zip(rows, white, strict=True):
                row.advantages = advantages
        stats |= spread("normalized_advantage", trainable_values(rows, "advantages"))
        for sample in samples:
            mine = [row for owner, row in owned if owner is sample]
            sample.advantage = float(np.mean(trainable_values(mine, "advantages")))
        return rows, stats

    def _score_values(self, rows: Sequence[TrainSequence]) -> tuple[list[list[float]], float]:
        """The critic's value after each token of each row, and the seconds it took."""
        lifecycle.score_start(logger, "critic", "value_score", len(rows))
        began = time.perf_counter()
        values = self.instance.score_values("critic", [row.tokens for row in rows], micro_bs=self.config.score_micro_bs)
        elapsed = time.perf_counter() - began
        lifecycle.score_end(logger, "critic", "value_score", len(rows))
        return values, elapsed

    # -- updates ---------------------------------------------------------------------------------------------------

    def update(self, rows: list[TrainSequence]) -> dict[str, float]:
        """Train the critic, and after its warm-up the policy."""
        epoch, step = self.state.epoch, self.state.step
        stats = self._update_critic(rows)
        if step < self.config.critic_warmup_steps:
            lifecycle.train_skip(logger, epoch, step)
            return stats | self.instance.finish_step() | {"actor_train_skipped": 1.0}
        actor = self.train_in_passes(rows, self.train, "actor")
        if "policy_train_wall_time_s" in actor:
            actor["actor_train_wall_time_s"] = actor.pop("policy_train_wall_time_s")
        return actor | stats | {"actor_train_skipped": 0.0}

    def _update_critic(self, rows: list[TrainSequence]) -> dict[str, float]:
        began = time.perf_counter()
        found = self.train_in_passes(rows, self._train_critic, "critic", log_rows=True)
        stats = {f"critic_{name}": value for name, value in found.items() if not name.endswith("_time_s")}
        del stats["critic_loss"]  # the same number as critic_value_loss
        stats["critic_train_time_s"] = time.perf_counter() - began
        lifecycle.critic_value_loss(logger, self.state.epoch, self.state.step, stats["critic_value_loss"])
        return stats

    def _train_critic(self, rows: list[TrainSequence]) -> dict[str, float]:
        """One train call of the critic with the run's sizes."""
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


def fill_returns(row: TrainSequence, values: Sequence[float], *, gamma: float, lam: float, bootstrap: bool) -> None:
    """Give a row its old values, returns and advantages at the tokens that are trained on, and 0 at the others.

    The reward belongs to the last of these tokens. Entry i of ``row.values`` is the value before token i.

    Args:
        row: a row with ``reward`` and at least one token to train on.
        values: the critic's value after each token of the row.
        gamma: discount of later rewards.
        lam: GAE's lambda.
        bootstrap: the response goes on after its last token, and is worth there what the critic says; else 0.
    """
    rewards = [0.0] * (sum(row.trainable()) - 1) + [row.reward]
    fill_gae(row, rewards, values, gamma=gamma, lam=lam, bootstrap=bootstrap)


def _value_stats(rows: Sequence[TrainSequence]) -> dict[str, float]:
    """Statistics over all tokens of a step; the explained variance only where the returns vary at all."""
    values, returns = trainable_values(rows, "values"), trainable_values(rows, "returns")
    stats = {
        **spread("old_logprob", trainable_values(rows, "logprobs")),
        **spread("critic_value", values),
        **spread("return", returns),
        **spread("gae_advantage", trainable_values(rows, "advantages")),
    }
    variance = float(np.var(returns))
    if variance > 0:
        stats["critic_explained_variance"] = 1.0 - float(np.var(np.subtract(returns, values))) / variance
    return stats
