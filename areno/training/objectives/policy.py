"""The policy objective: trains the policy, and optionally a critic, on rows with rewards.

    1. log-probs of the reference, of the teacher, and of the policy before the update; values of the critic
    2. advantages and returns
    3. optimizer steps, in passes over minibatches
    4. statistics

:class:`PolicySettings` defines steps 1 and 2. Each :class:`Learner` defines a loss and the number of optimizer steps.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from areno.engine.backend import ACTOR, Backend
from areno.errors import RewardError
from areno.loss_fns.proximal import divergences
from areno.loss_fns.shaping import (
    Credits,
    RewardShaping,
    credit_advantages,
    select_by_second_moment,
    shape_advantages,
    trained_values,
    untruncated,
)
from areno.training.objectives.passes import Learner, Order
from areno.types import TrainSequence

TokenRows = Sequence[Sequence[int]]
Stage = Literal["rewards", "logprobs", "values", "advantages", "train"]
Around = Callable[[Stage, str, int], AbstractContextManager[None]]
"""Function that returns the context manager inside which a stage of the objective runs, for example to measure its time.

The arguments are the stage, the role of the model, and the number of rows.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Settings of :meth:`PolicyObjective.prepare`."""

    shaping: RewardShaping  # how rewards become advantages
    rows_at_once: Callable[[str, TokenRows], int]  # rows per scoring pass, given the role and the rows
    scores: Sequence[tuple[str, str]] = ()  # roles that score log-probs, each with the column for the log-probs
    # scoring functions of roles on external servers
    scorers: Mapping[str, Callable[[TokenRows, Sequence[float]], list[list[float]]]] = field(default_factory=dict)
    critic: str | None = None  # role that scores values; None for no critic
    reward_path: str | None = None  # path of the reward model, for messages
    recomputes: bool = False  # whether scored ``prox_logprobs`` replace the log-probs of the rollout
    m2_threshold: float | None = None  # bound of M2PO; None: M2PO is off


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rows that are ready for the update, with statistics.

    Attributes:
        populations: for each metric name, the values of the metric, for example one value per row. Mean, minimum and maximum
            of the values are to be reported. If :meth:`PolicyObjective.prepare` was called with ``credits`` (rewards of
            segments), the metrics are those that :func:`~areno.loss_fns.shaping.credit_advantages` returns. Otherwise, they are
            those that :func:`~areno.loss_fns.shaping.shape_advantages` returns, except ``gae_advantages``.
        divergences: estimates of the KL divergence between the sampling policy and the policy before the update, averaged
            over the trained tokens.
    """

    rows: list[TrainSequence]  # the rows to train on
    populations: dict[str, Tensor] = field(default_factory=dict)
    unnormalized: list[float] = field(default_factory=list)  # advantages before ``adv_norm``, per trained token
    divergences: dict[str, float] = field(default_factory=dict)
    m2_masked: float | None = None  # share of the trained tokens that M2PO masks


class PolicyObjective:
    """Prepares rows for training, and trains one model per entry of ``learners``: the policy, and optionally a critic.

    Each stage, such as scoring or training, runs inside a context manager. The function ``around`` creates this context manager
    at the beginning of the stage.
    """

    def __init__(
        self,
        models: Backend,
        settings: PolicySettings,
        learners: Sequence[Learner],
        *,
        seed: int,
        order: Order,
        around: Around | None = None,
    ) -> None:
        self.models, self.settings, self.learners = models, settings, learners
        self._seed, self._order = seed, order
        self._around: Around = around or (lambda *_: nullcontext())

    def rewards(self, tokens: TokenRows, completion: Callable[[int], str]) -> list[float]:
        """Score rows with the reward model. ``completion`` returns the text of a row's answer, for error messages."""
        with self._around("rewards", "reward", len(tokens)):
            scores = self.models.score_rewards("reward", tokens, self.settings.rows_at_once("reward", tokens))
        for index, score in enumerate(scores):
            if not math.isfinite(score):
                raise RewardError(
                    f"the reward model {self.settings.reward_path} gave the non-finite score {score} to the completion "
                    f"{completion(index)[:200]!r}; check the model, or try --dtype float32 (actor.dtype=float32)"
                )
        return scores

    def prepare(self, rows: list[TrainSequence], credits: Credits | None = None) -> Prepared:
        """Add the loss inputs to the rows: advantages, returns, and log-probs of models such as the reference.

        With a critic, also add the critic's values. This method must not be called twice for the same row.

        Args:
            rows: the rows to change in place, with ``tokens``, ``logprobs``, ``reward``, ``group`` and ``temperature``.
            credits: rewards of segments, such as turns. These rewards replace the rows' rewards. With credits, ``returns``
                is not set, and a critic is not supported.
        """
        settings = self.settings
        tokens = [row.tokens for row in rows]
        for role, column in settings.scores:
            self._score(rows, role, column)
        gaps = _divergences(rows) if any(column == "prox_logprobs" for _, column in settings.scores) else {}
        self._use_recomputed(rows)
        values = None
        if settings.critic is not None:
            with self._around("values", settings.critic, len(rows)):
                size = settings.rows_at_once(settings.critic, tokens)
                values = self.models.score_values(settings.critic, tokens, size)
        with self._around("advantages", "", len(rows)):
            if credits is None:
                populations = shape_advantages(rows, settings.shaping, values)
            else:
                populations = credit_advantages(rows, settings.shaping, credits)
        bound = settings.m2_threshold
        m2_masked = None if bound is None else select_by_second_moment(rows, bound)
        trained = untruncated(rows) if settings.shaping.mask_no_eos_with_zero else rows
        unnormalized = populations.pop("gae_advantages", torch.empty(0)).tolist()
        return Prepared(trained, populations, unnormalized, gaps, m2_masked)

    def complete(self, rows: list[TrainSequence]) -> None:
        """Add the missing loss inputs, such as reference log-probs, to rows that have advantages, in place."""
        for role, column in self.settings.scores:
            if not all(getattr(row, column) for row in rows):
                self._score(rows, role, column)
        self._use_recomputed(rows)
        if self.settings.m2_threshold is not None:
            select_by_second_moment(rows, self.settings.m2_threshold)

    def _use_recomputed(self, rows: Sequence[TrainSequence]) -> None:
        for row in rows if self.settings.recomputes else ():
            row.logprobs, row.prox_logprobs = row.prox_logprobs, []

    def _score(self, rows: Sequence[TrainSequence], role: str, column: str) -> None:
        """Compute the log-probs of the rows with the model ``role``, and store them in the attribute ``column`` of each row.

        The log-probs are computed at the temperature of the row.
        """
        tokens, temperatures = [row.tokens for row in rows], [row.temperature for row in rows]
        with self._around("logprobs", role, len(rows)):
            if role in self.settings.scorers:
                scored = self.settings.scorers[role](tokens, temperatures)
            else:
                size = self.settings.rows_at_once(role, tokens)
                records = [row.routed_experts for row in rows] if role == ACTOR else []
                routed = {"routed": records} if any(record is not None for record in records) else {}
                scored = self.models.score_logprobs(role, tokens, temperatures, size, **routed)
        for row, logprobs in zip(rows, scored, strict=True):
            setattr(row, column, logprobs)

    def updates(self, rows: Sequence[TrainSequence], step: int) -> Iterator[tuple[str, dict[str, float] | None]]:
        """Run the optimizer steps of a training step on prepared rows.

        Yields:
            For each learner: its role, and the statistics of its optimizer steps. If the learner's training starts at a later
            step, the statistics are None.
        """
        for learner in self.learners:
            if step < learner.first_step:
                yield learner.role, None
                continue
            with self._around("train", learner.role, len(rows)):
                stats = learner.learn(rows, order=self._order, seed=self._seed, step=step)
            yield learner.role, stats


def _divergences(rows: Sequence[TrainSequence]) -> dict[str, float]:
    """Return the means of :func:`areno.loss_fns.proximal.divergences` over the trained tokens."""
    pairs = [trained_values(rows, name) for name in ("logprobs", "prox_logprobs")]
    if not pairs[0]:
        return {}
    behavior, proximal = torch.tensor(pairs, dtype=torch.float64)
    return {name: float(x.mean()) for name, x in divergences(behavior, proximal).items()}
