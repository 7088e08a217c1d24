"""Losses and advantages, independent of trainer, engine and I/O.

- ``loss_interface``: inputs and outputs of a loss. ``reduces_over`` declares the unit that a loss averages over.
- ``gspo``, ``grpo``, ``ppo``, ``value`` (critics), ``sft``, ``dpo``, ``reward_model``: one loss each.
- ``policy_loss``: one configurable policy loss, for ``areno run`` and for most files in ``areno/algorithms``.
- ``clipping``: importance ratios, clipping, averages and statistics for all policy losses; ``kl``: KL estimators.
- ``proximal``: approximations of the proximal policy; ``rejection``: rejection sampling of stale tokens.
- ``advantages``: the estimators that the option ``--advantage`` selects.
- ``shaping``: token advantages from rewards; ``gae`` and ``norm``: the modules that it uses for GAE and normalization.
- ``stats``: statistics that are aggregated exactly over microbatches.
- ``units``: a decorator for losses that are the mean of one number per token, sequence or pair.

To add a loss, write a function with the interface of ``loss_interface``. Then declare an ``AlgorithmSpec`` that uses this
function. The spec is either the variable ``SPEC`` of a new file ``areno/algorithms/<name>.py``, such as ``gmpo.py``, or
the variable ``NAME`` of your own file, which you pass as ``--algo FILE.py:NAME``. See docs/algorithms.md#your-own.
"""

from areno.loss_fns.advantages import compute_group_advantages
from areno.loss_fns.dpo import dpo_loss_fn
from areno.loss_fns.gae import compute_gae, whiten
from areno.loss_fns.grpo import grpo_loss_fn
from areno.loss_fns.gspo import gspo_loss_fn
from areno.loss_fns.kl import kl_penalty
from areno.loss_fns.loss_interface import DataPack, LossFn, reduces_over, reduction_of, sequence_sums
from areno.loss_fns.norm import Norm
from areno.loss_fns.policy_loss import PolicyLossConfig, policy_loss_fn
from areno.loss_fns.ppo import ppo_loss_fn
from areno.loss_fns.rejection import RejectionSampling
from areno.loss_fns.reward_model import reward_model_loss_fn
from areno.loss_fns.sft import sft_loss_fn
from areno.loss_fns.shaping import RewardShaping, shape_advantages
from areno.loss_fns.stats import Count, Mean, Range, Spread, TokenFlags, masked_mean, masked_range, masked_spread
from areno.loss_fns.value import value_loss_fn

__all__ = [
    "Count",
    "DataPack",
    "LossFn",
    "Mean",
    "Norm",
    "PolicyLossConfig",
    "Range",
    "RejectionSampling",
    "RewardShaping",
    "Spread",
    "TokenFlags",
    "compute_gae",
    "compute_group_advantages",
    "dpo_loss_fn",
    "grpo_loss_fn",
    "gspo_loss_fn",
    "kl_penalty",
    "masked_mean",
    "masked_range",
    "masked_spread",
    "policy_loss_fn",
    "ppo_loss_fn",
    "reduces_over",
    "reduction_of",
    "reward_model_loss_fn",
    "sequence_sums",
    "sft_loss_fn",
    "shape_advantages",
    "value_loss_fn",
    "whiten",
]
