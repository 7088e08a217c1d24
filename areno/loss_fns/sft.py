"""Supervised fine-tuning: negative log-likelihood of the response tokens."""

import torch
from torch import Tensor

from areno.loss_fns.clipping import sequence_means
from areno.loss_fns.loss_interface import DataPack, in_float, sequence_sums
from areno.loss_fns.units import Names, Quantity, mean_loss

# Bounds the perplexity of very unlikely sequences, so that sums stay finite.
MAX_LOG_PPL = 100.0

_NAMES: Names = {
    "sft_loss": ("loss", "mean"),
    "sft_logprob_mean": ("logprob", "mean"),
    "sft_target_tokens": ("loss", "count"),
}


@mean_loss("token", _NAMES)
def sft_loss_fn(data_pack: DataPack, logprobs: Tensor) -> dict[str, Quantity]:
    """Compute L = mean of -log pi(t) over all response tokens t of the optimizer step.

    Args:
        data_pack: needs ``packed_response_mask``, ``packed_seq_ids`` and ``packed_num_sequences``.

    Returns:
        Loss and statistics: sft_loss, sft_logprob_mean and sft_target_tokens. ``sft_loss_fn.units`` returns
        the quantities before averaging: loss and logprob per token, and ppl, the perplexity of each
        sequence that has response tokens.
    """
    mask = data_pack["packed_response_mask"]
    logprobs = torch.where(mask, in_float(logprobs), 0.0)
    means = sequence_means(logprobs.detach().double(), data_pack)
    return {
        "loss": Quantity(-logprobs, mask),
        "logprob": Quantity(logprobs, mask),
        "ppl": Quantity((-means).clamp(max=MAX_LOG_PPL).exp(), sequence_sums(mask.double(), data_pack) > 0),
    }
