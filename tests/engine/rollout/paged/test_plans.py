"""Plans over pages against plans over slots, for every kind of layer."""

from __future__ import annotations

import pytest
import torch

from areno.engine.model.loading import prepare
from areno.engine.rollout.paged.backends import gathered
from areno.engine.rollout.paged.paged_kv_cache import PagedCache
from areno.engine.rollout.paged.plans import PagedDecodePlan, PagedPrefillPlan
from areno.engine.rollout.slot_cache import DecodePlan, PrefillPlan, PrefillSpan, SlotCache
from tests.support.tiny import VOCAB, tiny_module

# Full attention, windows, soft-capping, windows and full, sinks, recurrent states.
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_oss", "qwen3_5")
PROMPTS = ([7, 8, 9] * 8, [5] * 13, [3, 90, 14])


def run(model, cache, paged):
    """Return hidden states: two prompts prefilled together, one in chunks, then decode steps of samples that share them."""
    tokens = torch.randint(0, VOCAB, (6, 12), generator=torch.Generator().manual_seed(3))
    cache.reserve(8, 64)
    out = []

    def prefill(spans, ids):
        plan = (PagedPrefillPlan if paged else PrefillPlan)(cache, spans)
        out.append(model.body(torch.tensor(ids), plan.position_ids, plan))
        plan.finish()

    first, second, third = PROMPTS
    prefill([PrefillSpan([0, 1], 24), PrefillSpan([2], 13)], first + second)
    prefill([PrefillSpan([3, 4, 5], 2)], third[:2])
    prefill([PrefillSpan([3, 4, 5], 1, 2)], third[2:])
    lengths = [24, 24, 13, 3, 3, 3]
    for step in range(12):
        positions = [length + step for length in lengths]
        fed = torch.cat([tokens[:, step], torch.zeros(2, dtype=torch.long)])
        plan = (PagedDecodePlan if paged else DecodePlan).of(cache, positions, 48)
        out.append(model.body(fed, plan.position_ids, plan)[:6])
    return torch.cat(out)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [16, 4])
def test_pages_and_slots_give_the_same_numbers(family, page_size):
    model = prepare(tiny_module(family), family)
    with torch.inference_mode():
        paged = run(model, PagedCache(64, page_size=page_size), paged=True)
        slots = run(model, SlotCache(), paged=False)
    assert torch.equal(paged, slots)


def test_a_padding_row_changes_no_other_row(monkeypatch):
    """Padding rows may coincide with rows of samples that are being prefilled, which hold real pages."""
    model = prepare(tiny_module("llama"), "llama")
    with torch.inference_mode():
        cache = PagedCache(64)
        cache.reserve(8, 64)
        plan = PagedPrefillPlan(cache, [PrefillSpan([slot], 5) for slot in range(8)])
        model.body(torch.arange(40), plan.position_ids, plan)
        before = [gathered(cache.pool(0)[0], cache.table[row : row + 1], 5).clone() for row in range(8)]
        plan = PagedDecodePlan.of(cache, [5, 5, 5], 16)
        model.body(torch.arange(8), plan.position_ids, plan)
        after = [gathered(cache.pool(0)[0], cache.table[row : row + 1], 5) for row in range(8)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_chunked_prefill_continues_in_its_own_pages_and_a_reused_row_starts_over():
    cache = PagedCache(64)
    cache.reserve(8, 64)
    PagedPrefillPlan(cache, [PrefillSpan([0, 1, 2], 20)]).finish()
    first = cache.pages_of(0)
    assert cache.pages_of(1) == cache.pages_of(2) == first
    PagedPrefillPlan(cache, [PrefillSpan([0, 1, 2], 20, 20)]).finish()
    assert cache.pages_of(0)[:2] == first, "the partly filled page was copied although the others wait for it"
    assert cache.pages_of(1) == cache.pages_of(2) == cache.pages_of(0)
    assert cache.allocator.used == 3
    PagedPrefillPlan(cache, [PrefillSpan([1], 5)])
    assert len(cache.pages_of(1)) == 1
    assert cache.pages_of(1) != first[:1]
