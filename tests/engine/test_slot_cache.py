"""The memory of the slot cache."""

from __future__ import annotations

import torch

from areno.engine.rollout.slot_cache import SlotCache


def test_more_slots_do_not_get_the_length_of_an_earlier_sequence_and_keep_their_tokens():
    cache = SlotCache()
    cache.reserve(1, 4096)
    keys, values = torch.randn(2, 64, 3, 8)
    cache.write(0, torch.zeros(64, dtype=torch.long), torch.arange(64), keys, values)
    cache.reserve(64, 64)
    assert cache.nbytes() <= 64 * 256 * 2 * 3 * 8 * 4, "bytes of 256 tokens per slot; 4097 were allocated before"
    found = cache.read(0, 1, 64)
    assert torch.equal(found[0][0].transpose(0, 1), keys)
    assert torch.equal(found[1][0].transpose(0, 1), values)
