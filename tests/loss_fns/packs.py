"""Random microbatches for the loss tests, a table of all losses, and finite differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from areno.algorithms.gmpo import GMPOOptions, gmpo_loss_fn
from areno.algorithms.simpo import SimPOOptions, simpo_loss_fn
from areno.loss_fns import (
    Count,
    PolicyLossConfig,
    RejectionSampling,
    TokenFlags,
    dpo_loss_fn,
    grpo_loss_fn,
    gspo_loss_fn,
    policy_loss_fn,
    ppo_loss_fn,
    reward_model_loss_fn,
    sft_loss_fn,
    value_loss_fn,
)
from areno.loss_fns.units import with_names
from areno.loss_fns.value import CRITIC_NAMES
from areno.training.objectives.pairs import DPO, REWARD_MODEL
from areno.training.objectives.sft import SFT
from tests.support.examples import examples

QUICK = settings(max_examples=examples(50), deadline=None, derandomize=True, database=None)
STREAMS = (
    *("logprobs", "advantages", "ref_logprobs", "values", "returns", "entropy"),
    *("prox_logprobs", "teacher_logprobs", "versions", "keep"),
)
# The tested update turns version 5 into version 6.
VERSION = 6


@dataclass
class Batch:
    """A pack, the outputs of the model for it, and the same numbers as plain lists, one list per sequence.

    A row holds every stream at the response tokens of one sequence; ``x`` is the model's log-prob (or value) there.
    """

    pack: dict
    logprobs: torch.Tensor
    scores: torch.Tensor

    @property
    def rows(self) -> list[list[dict]]:
        """Response tokens of each sequence."""
        rows: list[list[dict]] = [[] for _ in range(self.pack["packed_num_sequences"])]
        for t, sequence in enumerate(self.pack["packed_seq_ids"].tolist()):
            if self.pack["packed_response_mask"][t]:
                token = {name: float(self.pack[f"packed_{name}"][t]) for name in STREAMS}
                rows[sequence].append(token | {"x": float(self.logprobs[t])})
        return rows

    def of(self, case: Case) -> torch.Tensor:
        """The model output that the loss of a case reads."""
        return self.scores if case.per_sequence else self.logprobs

    def part(self, first: int, last: int) -> Batch:
        """Sequences ``first`` up to but excluding ``last``, as a separate microbatch."""
        ids = self.pack["packed_seq_ids"]
        own = (ids >= first) & (ids < last)
        pack = {key: value[own] for key, value in self.pack.items() if isinstance(value, torch.Tensor)}
        pack |= {"packed_seq_ids": ids[own] - first, "packed_num_sequences": last - first}
        return Batch(pack, self.logprobs[own], self.scores[first:last])

    def cast(self, dtype: torch.dtype) -> Batch:
        """The same batch in another precision."""
        pack = {
            key: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for key, value in self.pack.items()
        }
        return Batch(pack, self.logprobs.to(dtype), self.scores.to(dtype))


def make_batch(lengths, seed=0, mask_share=0.7, shift=0.3, equal_advantages=False) -> Batch:
    """Sequences with ``lengths`` actions in float64; ``shift`` is how far apart policy, reference and rollout lie."""
    rng = np.random.default_rng(seed)
    actions, ids = sum(lengths), np.repeat(np.arange(len(lengths)), lengths)
    mask = rng.random(actions) < mask_share
    old = -rng.random(actions) * 4
    advantages = np.full(len(lengths), 0.0) if equal_advantages else rng.normal(0, 1, len(lengths))
    streams = {
        "logprobs": old,
        # Tokens of one sequence differ too, as they do under PPO.
        "advantages": advantages[ids] * (1 + 0.1 * rng.random(actions)),
        "ref_logprobs": old + rng.normal(0, shift, actions),
        "values": rng.normal(0, 1, actions),
        "returns": rng.normal(0, 1, actions),
        "entropy": rng.random(actions),
    }
    pack = {f"packed_{name}": torch.tensor(values, dtype=torch.float64) for name, values in streams.items()}
    pack |= {
        "packed_response_mask": torch.tensor(mask),
        "packed_seq_ids": torch.tensor(ids, dtype=torch.long),
        "packed_num_sequences": len(lengths),
    }
    logprobs = np.where(mask, old + rng.normal(0, shift, actions), 0.0)
    scores = torch.tensor(rng.normal(0, 2, len(lengths)))
    for name in ("prox_logprobs", "teacher_logprobs"):
        pack[f"packed_{name}"] = torch.tensor(np.minimum(old + rng.normal(0, shift, actions), -1e-3))
    pack["packed_versions"] = torch.tensor(rng.integers(-1, VERSION, actions))
    pack["packed_keep"] = torch.tensor(rng.random(actions) < 0.7)
    return Batch(pack, torch.tensor(logprobs, dtype=torch.float64), scores)


@st.composite
def batches(draw, shifts=(0.0, 0.05, 0.5, 2.0)):
    """Microbatches of 2, 4 or 6 sequences, some without actions or response tokens."""
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3).flatmap(_evened))
    return make_batch(
        lengths,
        seed=draw(st.integers(0, 10_000)),
        mask_share=draw(st.sampled_from([0.0, 0.5, 1.0])),
        shift=draw(st.sampled_from(shifts)),
        equal_advantages=draw(st.booleans()),
    )


def _evened(lengths):
    return st.lists(st.integers(0, 7), min_size=len(lengths), max_size=len(lengths)).map(lambda more: lengths + more)


@dataclass(frozen=True)
class Case:
    """One loss with one setting.

    ``per_sequence`` losses read scores instead of log-probs; ``frozen`` losses hold parts of themselves constant, so that
    their gradient is not the slope of their value.
    """

    name: str
    loss_fn: Callable
    per_sequence: bool = False
    frozen: bool = False


def family(name: str, frozen: bool = False, **knobs) -> Case:
    return Case(
        f"family-{name}", partial(policy_loss_fn, knobs=PolicyLossConfig(**knobs), version=VERSION), frozen=frozen
    )


CASES = [
    Case("sft", sft_loss_fn),
    Case("grpo", grpo_loss_fn),
    Case("grpo-asymmetric-dual", partial(grpo_loss_fn, clip_eps=0.1, clip_eps_high=0.3, dual_clip=1.5)),
    Case("grpo-sequence-kl", partial(grpo_loss_fn, loss_mean="sequence", kl_coef=0.2)),
    Case("dr_grpo-kl", partial(grpo_loss_fn, loss_mean="dr_grpo", max_tokens=11, kl_coef=0.3, kl_type="k2")),
    Case("gspo", partial(gspo_loss_fn, clip_eps=0.05)),
    Case("gspo-asymmetric-kl", partial(gspo_loss_fn, clip_eps=0.02, clip_eps_high=0.2, kl_coef=0.2, kl_type="abs")),
    Case("gmpo", partial(gmpo_loss_fn, knobs=GMPOOptions(0.1))),
    Case("ppo", ppo_loss_fn),
    Case("ppo-kl", partial(ppo_loss_fn, clip_eps_high=0.4, clip_ratio_c=1.5, use_kl_loss=True, kl_loss_coef=0.1)),
    Case("value", value_loss_fn),
    Case("dpo", dpo_loss_fn),
    Case("dpo-smooth", partial(dpo_loss_fn, beta=0.7, label_smoothing=0.2)),
    Case("dpo-ipo-normalized", partial(dpo_loss_fn, loss_type="ipo", length_normalized=True)),
    Case("dpo-hinge", partial(dpo_loss_fn, beta=0.5, loss_type="hinge")),
    Case("simpo", partial(simpo_loss_fn, knobs=SimPOOptions(1.5, 0.5))),
    Case("reward-model", reward_model_loss_fn, per_sequence=True),
    Case("critic", with_names(value_loss_fn, CRITIC_NAMES, value_loss_coef=1.0)),
    Case("language-model", SFT.experiment_loss()),
    Case("preference-ipo", DPO.experiment_loss(loss_type="ipo", length_normalized=True)),
    Case("pair-score", REWARD_MODEL.experiment_loss(), per_sequence=True),
    family("ppo"),
    family("dapo-dual", eps_clip=0.1, eps_clip_higher=0.3, c_clip=1.5),
    family("gspo", importance_sampling_level="sequence", eps_clip=0.05),
    family("sapo", use_sapo_loss=True),
    family("cispo", use_cispo_loss=True, frozen=True),
    Case("family-kl", partial(policy_loss_fn, kl_coef=0.3, kl_type="k2")),
    family("decoupled", use_decoupled_loss=True),
    family("m2po", use_decoupled_loss=True, m2_threshold=0.04, eps_clip=0.0),
    family("icepop", use_decoupled_loss=True, rejection_sampling=RejectionSampling(lower=0.5, upper=2.0)),
    family("kpop", use_decoupled_loss=True, rejection_sampling=RejectionSampling(metric="binary_kl", upper=0.1)),
    family(
        "gspo-clamped",
        importance_sampling_level="sequence",
        use_decoupled_loss=True,
        rejection_sampling=RejectionSampling(level="sequence", action="clamp", upper=1.1),
    ),
    family("loglinear", use_decoupled_loss=True, prox_logp_method="loglinear", frozen=True),
    family("linear", use_decoupled_loss=True, prox_logp_method="linear", frozen=True),
    family("metrics", use_decoupled_loss=True, prox_logp_method="metrics"),
    family("distilled", rl_loss_weight=0.0, distill_loss_weight=1.0, frozen=True),
    family("distilled-joint", distill_loss_weight=0.3, frozen=True),
]


def value_of(statistic) -> float:
    """The mean, or the count, that a statistic represents."""
    if isinstance(statistic, Count):
        return float(statistic.total)
    if isinstance(statistic, TokenFlags):
        return float(statistic.values.sum())
    return float(statistic.total) / max(float(statistic.count), 1.0)


def slopes(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, step: float = 1e-6) -> list[float]:
    """Central differences of a scalar function at each entry of a float64 vector."""
    result = []
    for t in range(len(x)):
        up, down = x.detach().clone(), x.detach().clone()
        up[t] += step
        down[t] -= step
        result.append((float(fn(up)) - float(fn(down))) / (2 * step))
    return result
