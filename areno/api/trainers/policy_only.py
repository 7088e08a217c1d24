"""Policy-gradient training with one model: GSPO, GRPO and similar losses.

Advantages are computed from the rewards of a group (the samples of a prompt), without a value model. The stages of a
step: samples -> rewards -> rows -> advantages -> optimizer steps. If a KL term or a KL reward is used, rows also get the
log-probs of a frozen reference.
"""

import logging
import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from areno.api.records import Sample
from areno.api.trainers.rollout_trainer import RolloutTrainer
from areno.config.advantages import AdvantageFn, get_advantage
from areno.config.hooks import ADVANTAGE_HOOK, load_hook, user_frame
from areno.errors import UsageError
from areno.loss_fns.gae import discounted_returns
from areno.loss_fns.shaping import Credits, RewardShaping
from areno.types import ModelRole, TrainSequence

logger = logging.getLogger("areno.api.trainers.policy_only.PolicyOnlyTrainer")


class PolicyOnlyTrainer(RolloutTrainer):
    """Trains the policy with advantages estimated from groups of rewards; see :class:`TrainingLoop`."""

    logger = logger

    def roles(self) -> list[ModelRole]:
        """Return the reference model if the run uses a KL term or a KL reward."""
        return [self.reference_role()] if self.config.takes_reference(ppo=False) else []

    def shaping(self) -> RewardShaping:
        """Return the settings for computing advantages from rewards, including the estimator that ``--advantage`` selects."""
        estimate = _estimator(self.config.advantage)

        def norm(rewards: Tensor, groups: Sequence[int]) -> Tensor:
            return torch.tensor(estimate(rewards.tolist(), groups), dtype=torch.float64)

        return RewardShaping(reward_clip=math.inf, reward_norm=norm, **self.reward_options)

    def credits(self, samples: list[Sample], rows: list[list[TrainSequence]]) -> Credits:
        """Return the rewards, and for each token the reward that applies to it.

        By default, there is one reward per sample. With ``--turn-discount``, there is one discounted return per turn.
        """
        discount = self.config.turn_discount
        if discount is None:
            owners = [[i] * len(row.tokens) for i, sample_rows in enumerate(rows) for row in sample_rows]
            return Credits([s.reward for s in samples], [s.prompt_index for s in samples], owners)
        # A turn is compared with the same turn of the other samples of the prompt.
        returns = [turn_returns(sample, discount) for sample in samples]
        keys = [
            (s.prompt_index, turn) for s, values in zip(samples, returns, strict=True) for turn in range(len(values))
        ]
        groups = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        first = accumulate(map(len, returns), initial=0)
        owners = [
            [-1 if turn < 0 else begin + turn for turn in row.turns]
            for sample, begin in zip(samples, first, strict=False)
            for row in sample.rows
        ]
        return Credits([value for values in returns for value in values], [groups[key] for key in keys], owners)


def turn_returns(sample: Sample, discount: float) -> list[float]:
    """Return the discounted return of each turn: G_k = r_k + discount G_{k+1}.

    r_k is the environment's reward for turn k. The reward function's reward is added to the last r_k.
    """
    rewards = list(sample.turn_rewards)
    rewards[-1] += sample.reward
    return discounted_returns(rewards, discount)


def _estimator(name: str) -> AdvantageFn:
    if ".py" not in name:
        return get_advantage(name)
    function = load_hook(name, ADVANTAGE_HOOK)
    path = ADVANTAGE_HOOK.split(name)[0].resolve()

    def estimate(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
        try:
            values = [float(value) for value in function(list(rewards), list(groups))]
        except Exception as error:
            cause = f"{type(error).__name__}: {error}{user_frame(error, path)}"
            raise UsageError(
                f"--advantage {name} failed: {cause}; correct this function, which must "
                "return a list with one number per reward"
            ) from error
        if len(values) != len(rewards):
            raise UsageError(
                f"--advantage {name} returned {len(values)} numbers for {len(rewards)} rewards; "
                "return one advantage per reward, in order"
            )
        for index, value in enumerate(values):
            if not math.isfinite(value):
                raise UsageError(
                    f"--advantage {name} returned {value} for reward {index} of {list(rewards)} (groups {list(groups)}); "
                    "return finite numbers, even for groups with equal rewards"
                )
        return values

    return estimate
