"""SimPO: simple preference optimization with a reference-free reward (Meng et al. 2024, arXiv:2405.14734)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from areno.config import AlgorithmSpec, option
from areno.config.algorithms import PAIR_TRAINER
from areno.loss_fns.clipping import sequence_means
from areno.loss_fns.loss_interface import DataPack, in_float, split_pairs
from areno.loss_fns.units import Quantity, mean_loss, means, of_all


@dataclass(frozen=True)
class SimPOOptions:
    """Options of SimPO: flags of ``areno train``, and keys of ``actor.algorithm_options``."""

    simpo_beta: float = option(
        2.0, above=0, help="Beta of the implicit reward. The reward of an answer is beta times its mean log-prob."
    )
    simpo_gamma: float = option(
        1.0,
        minimum=0,
        help="Target margin between the rewards of the chosen and the rejected answer (gamma).",
    )


@mean_loss("pair", means("pair_", "loss", "accuracy", "chosen_reward", "rejected_reward", "reward_margin"))
def simpo_loss_fn(data_pack: DataPack, logprobs: Tensor, knobs: SimPOOptions) -> dict[str, Quantity]:
    """L = - mean over pairs of log sigmoid(r_chosen - r_rejected - gamma), with r_i = (beta / L_i) sum_t log pi_t.

    The sum is over the L_i tokens of answer i, and the division by L_i removes the bias towards long answers. gamma is the
    target margin. No reference model is needed. ``pair_accuracy`` is the fraction of pairs with r_chosen > r_rejected.
    """
    masked = torch.where(data_pack["packed_response_mask"], in_float(logprobs), 0.0)
    rewards = knobs.simpo_beta * sequence_means(masked.double(), data_pack).to(masked.dtype)
    chosen, rejected = split_pairs(rewards, "simpo_loss_fn")
    margin = chosen - rejected
    return {
        "loss": of_all(-F.logsigmoid(margin - knobs.simpo_gamma)),
        "accuracy": of_all((margin > 0).float()),
        "chosen_reward": of_all(chosen),
        "rejected_reward": of_all(rejected),
        "reward_margin": of_all(margin),
    }


SPEC = AlgorithmSpec("simpo", PAIR_TRAINER, simpo_loss_fn, requires_rollout=False, options=SimPOOptions)
