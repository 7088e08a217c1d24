"""Check, when a model is loaded, that decoding with a KV cache gives the same logits as one forward pass.

Also determine the layout of the KV cache.
"""

from dataclasses import dataclass

import torch

from areno.engine.model.causal_lm import CausalLM
from areno.engine.model.load_check import probe_tolerance
from areno.engine.model.packing import PackedPlan
from areno.engine.model.routing import ChoiceRecorder, ChoiceReplay
from areno.engine.rollout.scheduler import COLUMN_STEP
from areno.engine.rollout.slot_cache import DecodePlan, LayerShape, PrefillPlan, PrefillSpan, SlotCache
from areno.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The layout of a model's KV cache."""

    bytes_per_token: int  # cache bytes per token, including a share of the recurrent states
    layers: tuple[LayerShape, ...]  # keys and values by layer; empty if some layers are recurrent


@torch.no_grad()
def validate_decoding(model: CausalLM, name: str) -> CacheShape:
    """Prefill a few tokens, decode two more tokens, and compare the logits with those of one forward pass over all tokens.

    Return the layout of the KV cache.

    Raises:
        UnsupportedModelError: the logits differ by more than rounding.
    """
    tokens = torch.randint(0, model.vocab_size, (9,), generator=torch.Generator().manual_seed(1)).to(model.device)
    packed, tolerance = PackedPlan([9], model.device), probe_tolerance(model.dtype)
    with (choices := ChoiceRecorder()):
        expected = model.logits(model.body(tokens, packed.position_ids, packed)).float()
    cache = SlotCache(model.device)
    cache.reserve(1, COLUMN_STEP)
    for offset, stop in ((0, 4), (4, 7)):  # in two chunks, like a long prompt
        prefill = PrefillPlan(cache, [PrefillSpan([0], stop - offset, offset)])
        with ChoiceReplay(choices, first=offset, tolerance=tolerance):
            hidden = model.body(tokens[offset:stop], prefill.position_ids, prefill)
        prefill.finish()
    decoded = [model.logits(hidden[-1:])]
    for position in (7, 8):
        plan = DecodePlan.of(cache, [position], COLUMN_STEP)
        fed = torch.where(plan.position_ids > 0, tokens[position], tokens[0])
        with ChoiceReplay(choices, first=position, tolerance=tolerance):
            decoded.append(model.logits(model.body(fed, plan.position_ids, plan)[:1]))
    gap = (torch.cat(decoded).float() - expected[6:]).abs().max() / expected.abs().max().clamp(min=1e-6)
    if not gap <= tolerance:
        raise UnsupportedModelError(
            f"{name}: decoding token by token gives different logits than one forward pass over the same tokens (relative "
            f"difference {float(gap):.1e}); {type(model.module).__name__} probably keeps a state between tokens that areno "
            "does not support"
        )
    layers = tuple(
        LayerShape(layer, keys.shape[1], keys.shape[3], cache.values[layer].shape[3])
        for layer, keys in sorted(cache.keys.items())
    )
    return CacheShape(-(-cache.nbytes() // (cache.slots * cache.columns)), () if cache.states.tensors() else layers)
