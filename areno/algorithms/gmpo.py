"""GMPO: geometric-mean policy optimization (Zhao et al. 2025, arXiv:2507.20673)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areno.config import AlgorithmSpec, option
from areno.loss_fns.clipping import (
    advantages_of,
    log_difference,
    over_sequences,
    policy_metrics,
    ratio_of,
    sequence_means,
    with_kl,
)
from areno.loss_fns.loss_interface import DataPack, reduces_over
from areno.loss_fns.stats import TokenFlags, masked_mean


@dataclass(frozen=True)
class GMPOOptions:
    """Options of GMPO: flags of ``areno train``, and keys of ``actor.algorithm_options``."""

    gmpo_clip_eps: float = option(0.4, above=0, help="Clip range of the logarithm of a token's importance ratio.")


@reduces_over("sequence", entropy=True)
def gmpo_loss_fn(data_pack: DataPack, logprobs: Tensor, knobs: GMPOOptions) -> tuple[Tensor, dict[str, Any]]:
    """loss = - mean_i A_i (prod_t c_t)^(1 / n_i), with log c_t = min(log r_t, eps) if A_i > 0, else max(log r_t, -eps).

    A_i is the mean advantage of sequence i, and n_i is its number of response tokens. r_t = pi / pi_rollout is the importance
    ratio of token t, and c_t is the clipped ratio; eps is ``gmpo_clip_eps``. A sequence without response tokens counts in the
    mean over sequences, with the value 0.
    """
    ids, mask = data_pack["packed_seq_ids"], data_pack["packed_response_mask"]
    advantage = sequence_means(advantages_of(data_pack), data_pack)
    sign = torch.where(advantage > 0, 1.0, -1.0)[ids]
    difference = log_difference(data_pack, logprobs)
    clipped = (sign * difference > knobs.gmpo_clip_eps) & (advantage != 0)[ids]
    bounded = torch.where(clipped, sign * knobs.gmpo_clip_eps, difference)
    ratio = ratio_of(sequence_means(bounded.to(difference.dtype), data_pack))
    loss, metrics = with_kl(over_sequences(-advantage * ratio), None, 0.0)
    metrics |= policy_metrics(data_pack, logprobs, ratio_of(difference))
    return loss, metrics | {"clip_fraction": masked_mean(clipped.float(), mask), "clipped": TokenFlags(clipped)}


SPEC = AlgorithmSpec("gmpo", default_loss=gmpo_loss_fn, options=GMPOOptions, min_samples=2)
