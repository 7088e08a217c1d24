"""Losses and advantages: pure functions of tensors. No trainer, no engine, no I/O."""

from areno.loss_fns.advantages import compute_group_advantages
from areno.loss_fns.grpo import grpo_loss_fn
from areno.loss_fns.gspo import gspo_loss_fn
from areno.loss_fns.pack import DataPack, LossFn, reduces_over, reduction_of, sequence_sums
from areno.loss_fns.sft import sft_loss_fn
from areno.loss_fns.stats import Mean, Spread, masked_mean, masked_spread

__all__ = [
    "DataPack",
    "LossFn",
    "Mean",
    "Spread",
    "compute_group_advantages",
    "grpo_loss_fn",
    "gspo_loss_fn",
    "masked_mean",
    "masked_spread",
    "reduces_over",
    "reduction_of",
    "sequence_sums",
    "sft_loss_fn",
]
