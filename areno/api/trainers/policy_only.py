"""Policy-gradient training with one model: GSPO, GRPO, and losses like them.

Special here: the advantage of an answer comes from comparing rewards, with no value model. One step: samples -> rewards
-> advantages -> rows -> optimizer steps; a KL term adds the log-probs of a frozen reference.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from areno.api.trainers.rollout import RolloutTrainer, Sample
from areno.config.advantages import AdvantageFn, get_advantage
from areno.config.hooks import load_hook, split_spec, user_frame
from areno.config.validate import ADVANTAGE_HOOK
from areno.errors import UsageError
from areno.types import ModelRole, TrainSequence

logger = logging.getLogger("areno.api.trainers.policy_only.PolicyOnlyTrainer")


class PolicyOnlyTrainer(RolloutTrainer):
    """Rollout, reward, advantages by comparison, policy steps; see :class:`~areno.training.loop.TrainingLoop`."""

    logger = logger

    def roles(self) -> list[ModelRole]:
        """The reference, with a KL term."""
        return [self.reference_role()] if self.config.kl_coef > 0 else []

    def prepare(self) -> None:
        """Also find the estimator of ``--advantage``."""
        super().prepare()
        self._estimate = _estimator(self.config.advantage)

    def make_rows(self, samples: list[Sample]) -> tuple[list[TrainSequence], dict[str, float]]:
        """Rows whose response tokens all carry the advantage of the response, or of their turn."""
        if self.config.turn_discount is not None:
            rows = self._rows_by_turn(samples, self.config.turn_discount)
        else:
            rows = self._rows_by_sample(samples)
        return rows, self.score_reference(rows) if self.config.kl_coef > 0 else {}

    def _rows_by_sample(self, samples: list[Sample]) -> list[TrainSequence]:
        values = self._estimate([s.reward for s in samples], [s.prompt_index for s in samples])
        rows = []
        for sample, advantage in zip(samples, values, strict=True):
            sample.advantage = advantage
            for row in self.train_rows(sample):
                row.advantages = [0.0 if prompt else advantage for prompt in row.prompt_mask]
                rows.append(row)
        return rows

    def _rows_by_turn(self, samples: list[Sample], discount: float) -> list[TrainSequence]:
        """Each turn is compared with the turns of the same number of the prompt's other samples."""
        returns = [turn_returns(sample, discount) for sample in samples]
        places = [(s.prompt_index, turn) for s, own in zip(samples, returns, strict=True) for turn in range(len(own))]
        groups = {place: number for number, place in enumerate(dict.fromkeys(places))}
        values = iter(self._estimate([value for own in returns for value in own], [groups[place] for place in places]))
        rows = []
        for sample, own in zip(samples, returns, strict=True):
            advantages = [next(values) for _ in own]
            sample.advantage = sum(advantages) / len(advantages)
            for kept, row in zip(sample.rows(), self.train_rows(sample), strict=True):
                marks = zip(row.prompt_mask, kept.turns, strict=True)
                row.advantages = [0.0 if prompt or turn < 0 else advantages[turn] for prompt, turn in marks]
                rows.append(row)
        return rows

    def update(self, rows: list[TrainSequence]) -> dict[str, float]:
        """Train the policy."""
        return self.train_in_passes(rows, self.train, self.role)


def turn_returns(sample: Sample, discount: float) -> list[float]:
    """What each turn has led to: its own reward and, discounted, those of later turns; the sample's comes with the last.

    G_k = r_k + discount G_{k+1}, where the last turn's r is the environment's reward for it plus the reward function's.
    """
    assert sample.agent is not None
    rewards = list(sample.agent.turn_rewards)
    rewards[-1] += sample.reward
    found: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        found.append(following)
    return found[::-1]


def _estimator(name: str) -> AdvantageFn:
    """The estimator that ``--advantage`` names."""
    if ".py" not in name:
        return get_advantage(name)
    function = load_hook(name, positional=2, **ADVANTAGE_HOOK)
    option, default_name = ADVANTAGE_HOOK["option"], ADVANTAGE_HOOK["default_name"]
    path = split_spec(name, option=option, default_name=default_name)[0].resolve()

    def estimate(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
        try:
            values = [float(value) for value in function(list(rewards), list(groups))]
        except Exception as error:
            cause = f"{type(error).__name__}: {error}{user_frame(error, path)}"
            raise UsageError(f"--advantage {name}: {cause}; return a list of one number per reward") from error
        if len(values) != len(rewards):
            raise UsageError(
                f"--advantage {name} returned {len(values)} numbers for {len(rewards)} rewards; "
                "return one advantage per reward, in their order"
            )
        for index, value in enumerate(values):
            if not math.isfinite(value):
                raise UsageError(
                    f"--advantage {name} returned {value} for reward {index} of {list(rewards)} (groups {list(groups)}); "
                    "return finite numbers, also for groups whose rewards are all equal"
                )
        return values

    return estimate
