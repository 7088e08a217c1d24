"""DPO: trains on pairs of a chosen and a rejected answer (Rafailov et al. 2023, arXiv:2305.18290)."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from areno.loss_fns.clipping import sequence_means
from areno.loss_fns.loss_interface import DataPack, in_float, required, sequence_sums, split_pairs
from areno.loss_fns.units import Names, Quantity, mean_loss, means, of_all

_SHAPES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "sigmoid": lambda delta, beta: -F.logsigmoid(beta * delta),
    "ipo": lambda delta, beta: (delta - 0.5 / beta).square(),
    "hinge": lambda delta, beta: F.relu(1.0 - beta * delta),
}

_NAMES: Names = {
    **means("dpo_", "loss", "accuracy", "chosen_reward", "rejected_reward", "reward_margin"),
    **{"dpo_margin": ("reward_margin", "mean"), "total_loss": ("loss", "mean")},
    "dpo_response_len": ("response_len", "mean"),
}


@mean_loss("pair", _NAMES)
def dpo_loss_fn(
    data_pack: DataPack,
    logprobs: Tensor,
    beta: float = 0.1,
    *,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    length_normalized: bool = False,
) -> dict[str, Quantity]:
    """Compute the DPO loss, which is a mean over pairs of answers.

    D is the log-ratio of the chosen answer minus the log-ratio of the rejected answer. The log-ratio of an answer is
    the sum of log pi - log pi_ref over the response tokens. With ``length_normalized``, this sum is divided by the
    number of response tokens. eps is ``label_smoothing``, the assumed fraction of pairs with swapped labels (Mitchell
    2023, https://ericmitchell.ai/cdpo.pdf). The loss of a pair is (1 - eps) l(D) + eps l(-D), where ``loss_type``
    selects the function l:

    - ``sigmoid``: l(D) = -log sigmoid(beta D)
    - ``ipo``: l(D) = (D - 1 / (2 beta))^2 (Azar et al. 2023, arXiv:2310.12036)
    - ``hinge``: l(D) = max(0, 1 - beta D) (SLiC, Zhao et al. 2023, arXiv:2305.10425)

    Args:
        data_pack: needs ``packed_response_mask``, ``packed_ref_logprobs``, ``packed_seq_ids`` and
            ``packed_num_sequences``. Sequences alternate between chosen and rejected.
        beta: factor on the log-ratios, above 0. A larger beta keeps the policy closer to the reference.
        label_smoothing: eps, from 0 to below 0.5.
        loss_type: ``sigmoid``, ``ipo`` or ``hinge``.
        length_normalized: whether log-ratios are means over tokens instead of sums, so that long answers get no more
            weight than short answers.

    Returns:
        Loss and statistics: dpo_loss and total_loss (the loss), dpo_accuracy (fraction of pairs with D > 0),
        dpo_chosen_reward and dpo_rejected_reward (beta times a log-ratio), dpo_margin and dpo_reward_margin (both beta D,
        the difference of these rewards), and dpo_response_len. ``dpo_loss_fn.units`` returns the quantities before
        averaging: response_len per sequence, and all other quantities per pair.

    Raises:
        ValueError: an argument is out of range, the pack has no reference log-probs, or a sequence is unpaired.
    """
    if loss_type not in _SHAPES:
        raise ValueError(f"DPO loss_type {loss_type!r} is unknown; choose one of: {', '.join(_SHAPES)}")
    if not beta > 0:
        raise ValueError(f"beta must be above 0, got {beta}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be at least 0 and below 0.5, got {label_smoothing}")
    mask = data_pack["packed_response_mask"]
    reference = required(data_pack, "packed_ref_logprobs", "dpo_loss_fn", "set ref_logprobs in every row")
    # Subtract per token, and sum in float64: the log-probs of an answer under policy and reference are large and nearly equal,
    # so the difference of their sums would lose digits.
    ratios = torch.where(mask, in_float(logprobs) - in_float(reference), 0.0)
    per_sequence = (sequence_means if length_normalized else sequence_sums)(ratios.double(), data_pack).to(ratios.dtype)
    chosen, rejected = split_pairs(per_sequence, "dpo_loss_fn")
    delta, shape = chosen - rejected, _SHAPES[loss_type]
    margin = beta * chosen - beta * rejected
    return {
        "loss": of_all((1.0 - label_smoothing) * shape(delta, beta) + label_smoothing * shape(-delta, beta)),
        "accuracy": of_all((margin > 0).float()),
        "chosen_reward": of_all(beta * chosen),
        "rejected_reward": of_all(beta * rejected),
        "reward_margin": of_all(margin),
        "response_len": of_all(sequence_sums(mask.float(), data_pack)),
    }
