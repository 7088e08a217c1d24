"""Tokens that a loss marks as clipped are those whose gradient its clip range removes, and no others."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given

from areno.algorithms.gmpo import GMPOOptions, gmpo_loss_fn
from areno.loss_fns import PolicyLossConfig, RejectionSampling, grpo_loss_fn, gspo_loss_fn, policy_loss_fn, ppo_loss_fn
from tests.loss_fns.packs import QUICK, VERSION, batches

WIDE = 1e30


def family(**knobs):
    return partial(policy_loss_fn, knobs=PolicyLossConfig(**knobs), version=VERSION)


ICEPOP = {"use_decoupled_loss": True, "rejection_sampling": RejectionSampling(lower=0.5, upper=2.0)}
SEQUENCE = {"importance_sampling_level": "sequence"}
# Each loss with a clip range, and without.
LOSSES = {
    "grpo": (partial(grpo_loss_fn, clip_eps=0.1, clip_eps_high=0.3), partial(grpo_loss_fn, clip_eps=WIDE)),
    "grpo-dual": (partial(grpo_loss_fn, clip_eps=0.1, dual_clip=1.2), partial(grpo_loss_fn, clip_eps=WIDE)),
    "grpo-sequence": (
        partial(grpo_loss_fn, clip_eps=0.1, loss_mean="sequence"),
        partial(grpo_loss_fn, clip_eps=WIDE, loss_mean="sequence"),
    ),
    "gspo": (partial(gspo_loss_fn, clip_eps=0.02), partial(gspo_loss_fn, clip_eps=WIDE)),
    "ppo": (partial(ppo_loss_fn, clip_ratio_c=1.2), partial(ppo_loss_fn, clip_eps=WIDE, clip_ratio_c=WIDE)),
    "gmpo": (partial(gmpo_loss_fn, knobs=GMPOOptions(0.1)), partial(gmpo_loss_fn, knobs=GMPOOptions(WIDE))),
    "family": (family(eps_clip=0.1, c_clip=1.2), family(eps_clip=WIDE)),
    "family-sequence": (family(eps_clip=0.02, **SEQUENCE), family(eps_clip=WIDE, **SEQUENCE)),
    "icepop": (family(eps_clip=0.1, **ICEPOP), family(eps_clip=WIDE, **ICEPOP)),
    "m2po": (
        family(eps_clip=0.0, use_decoupled_loss=True, m2_threshold=0.04),
        family(eps_clip=WIDE, use_decoupled_loss=True, m2_threshold=0.04),
    ),
}


def gradient_of(loss_fn, batch):
    x = batch.logprobs.detach().clone().requires_grad_(True)
    loss, metrics = loss_fn(batch.pack, x)
    loss.backward()
    return x.grad, metrics


@pytest.mark.parametrize("name", LOSSES)
@QUICK
@given(batch=batches())
def test_marked_tokens_are_those_that_lose_their_gradient_to_the_clip_range(name, batch):
    clipping, open_range = LOSSES[name]
    gradient, metrics = gradient_of(clipping, batch)
    full, _ = gradient_of(open_range, batch)
    assert metrics["clipped"].values.tolist() == ((gradient == 0) & (full != 0)).tolist()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("gap", [0.5, -0.5])
def test_some_tokens_are_marked(name, gap):
    """Otherwise the comparison above could not fail."""
    pack = {
        "packed_response_mask": torch.tensor([True, True, True, False, True, True]),
        "packed_logprobs": torch.full((6,), -2.0),
        "packed_prox_logprobs": torch.full((6,), -2.0),
        "packed_advantages": torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0]),
        "packed_seq_ids": torch.tensor([0, 0, 0, 0, 1, 1]),
        "packed_num_sequences": 2,
        "packed_keep": torch.ones(6, dtype=torch.bool),
    }
    _, metrics = LOSSES[name][0](pack, torch.full((6,), -2.0 + gap))
    pushed = [True, True, True, False, False, False] if gap > 0 else [False, False, False, False, True, True]
    if gap > 0 and name in ("grpo-dual", "ppo", "family"):
        pushed[4:] = [True, True]  # the dual clip
    assert metrics["clipped"].values.tolist() == pushed


@pytest.mark.parametrize("knobs", [{"use_sapo_loss": True}, {"use_cispo_loss": True}])
@QUICK
@given(batch=batches())
def test_a_loss_whose_tokens_all_keep_their_gradient_marks_none(knobs, batch):
    _, metrics = gradient_of(family(**knobs), batch)
    assert "clipped" not in metrics
