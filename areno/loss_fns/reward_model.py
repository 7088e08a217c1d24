"""Reward-model training on pairs: the Bradley-Terry likelihood (Ouyang et al. 2022, arXiv:2203.02155, eq. 1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from areno.loss_fns.pack import DataPack, in_float, reduces_over, split_pairs
from areno.loss_fns.stats import Mean


@reduces_over("pair")
def reward_model_loss_fn(data_pack: DataPack, scores: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """L = -mean over pairs of log sigmoid(s_chosen - s_rejected).

    Args:
        data_pack: needs ``packed_num_sequences``; sequences alternate between chosen and rejected.
        scores: one score per sequence [packed_num_sequences].

    Returns:
        Loss and the statistics rm_loss, rm_accuracy (share of pairs with the chosen answer ahead), rm_margin,
        rm_chosen_score, rm_rejected_score.

    Raises:
        ValueError: there is not one score per sequence, or a sequence has no partner.
    """
    pairs = score_pairs(data_pack, scores)
    losses, count = pairs["loss"], torch.tensor(len(pairs["loss"]))
    metrics = {f"rm_{name}": Mean(values.detach().sum(), count) for name, values in pairs.items()}
    return losses.sum() / max(len(losses), 1), metrics


def score_pairs(data_pack: DataPack, scores: Tensor) -> dict[str, Tensor]:
    """What :func:`reward_model_loss_fn` is made of, pair by pair [pairs]: loss, accuracy, margin, chosen_score, rejected_score.

    Arguments and errors are those of :func:`reward_model_loss_fn`.
    """
    sequences = data_pack["packed_num_sequences"]
    if scores.shape != (sequences,):
        raise ValueError(
            f"reward_model_loss_fn needs one score for each of {sequences} sequences, got shape {tuple(scores.shape)}; "
            "train it on a reward model, not on a policy"
        )
    chosen, rejected = split_pairs(in_float(scores), "reward_model_loss_fn")
    margin = chosen - rejected
    return {
        "loss": -F.logsigmoid(margin),
        "accuracy": (margin > 0).float(),
        "margin": margin,
        "chosen_score": chosen,
        "rejected_score": rejected,
    }
