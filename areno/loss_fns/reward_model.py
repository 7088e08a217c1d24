"""Reward-model training on pairs: the Bradley-Terry likelihood (Ouyang et al. 2022, arXiv:2203.02155, eq. 1)."""

from torch import Tensor
from torch.nn import functional as F

from areno.loss_fns.loss_interface import DataPack, in_float, split_pairs
from areno.loss_fns.units import Quantity, mean_loss, means, of_all


@mean_loss("pair", means("rm_", "loss", "accuracy", "margin", "chosen_score", "rejected_score"))
def reward_model_loss_fn(data_pack: DataPack, scores: Tensor) -> dict[str, Quantity]:
    """Compute the loss: the mean of -log sigmoid(s_chosen - s_rejected) over the pairs.

    Args:
        data_pack: needs ``packed_num_sequences``. Sequences alternate between chosen and rejected.
        scores: one score per sequence [packed_num_sequences].

    Returns:
        Loss and statistics: rm_loss, rm_accuracy (fraction of pairs whose chosen answer scores higher), rm_margin,
        rm_chosen_score and rm_rejected_score. ``reward_model_loss_fn.units`` returns these quantities before averaging:
        one number per pair, under names without ``rm_``.

    Raises:
        ValueError: the number of scores differs from the number of sequences, or a sequence is unpaired.
    """
    sequences = data_pack["packed_num_sequences"]
    if scores.shape != (sequences,):
        raise ValueError(
            f"reward_model_loss_fn needs one score for each of {sequences} sequences, got scores of shape "
            f"{tuple(scores.shape)}; use this loss to train a reward model, not a policy"
        )
    chosen, rejected = split_pairs(in_float(scores), "reward_model_loss_fn")
    margin = chosen - rejected
    return {
        "loss": of_all(-F.logsigmoid(margin)),
        "accuracy": of_all((margin > 0).float()),
        "margin": of_all(margin),
        "chosen_score": of_all(chosen),
        "rejected_score": of_all(rejected),
    }
