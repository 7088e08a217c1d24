"""Reward-model training: a sequence classifier with one score learns to put the chosen answer above the rejected one."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from areno.api.trainers.preference import PreferenceTrainer
from areno.engine.train.batch import PackedBatch
from areno.observability import lifecycle
from areno.types import TrainSequence

logger = logging.getLogger("areno.api.trainers.reward_model.RewardModelTrainer")


class RewardModelTrainer(PreferenceTrainer):
    """Trains the score at the last token of each row; see :class:`PreferenceTrainer`."""

    logger = logger
    prefix = "rm_"
    held_out_stats = ("accuracy", "margin", "chosen_score", "rejected_score")

    def report_dropped(self, dropped: int) -> None:
        """How the DPO trainer says it, under this algorithm's name."""
        lifecycle.pair_dataset_filter(logger, "rm", dropped)

    def predict(self, rows: Sequence[TrainSequence], batch: PackedBatch) -> Tensor:
        """Scores of whole rows [sequences]."""
        tokens = [row.tokens for row in rows]
        return torch.tensor(self.instance.score_rewards("actor", tokens, micro_bs=self.config.score_micro_bs))
