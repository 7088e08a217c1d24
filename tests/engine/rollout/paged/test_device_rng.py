"""Sampling on the device: the same numbers and the same tokens as the host's."""

from __future__ import annotations

import random

import numpy as np
import torch

from areno.engine.rollout import counter_rng
from areno.engine.rollout.compiled.traced import plain_draw
from areno.engine.rollout.counter_rng import as_int64, random_bits
from areno.engine.rollout.sampler import SamplingTable
from areno.types import SamplingParams


def uniforms(seeds, counters):
    """Return uniform numbers as a decode step on the device generates them."""
    return random_bits(seeds, counters).double() * 2.0**-53


def test_the_generator_equals_the_one_of_the_host_bit_for_bit():
    rng = random.Random(0)
    seeds = [0, 1, -1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 2**64 + 5, *(rng.getrandbits(64) for _ in range(4000))]
    counters = [0, 1, 2, 2**31, 2**40, *(rng.randrange(10**6) for _ in range(len(seeds) - 5))]
    expected = counter_rng.uniforms(seeds, counters)
    got = uniforms(torch.tensor([as_int64(s) for s in seeds]), torch.tensor(counters))
    assert np.array_equal(got.numpy(), expected)
    assert 0 <= expected.min() < 0.01
    assert expected.max() > 0.99


def test_tokens_drawn_with_it_equal_those_of_the_sampling_table():
    generator = torch.Generator().manual_seed(0)
    params = [SamplingParams(greedy=i % 3 == 0, temperature=0.3 + i / 10) for i in range(12)]
    table = SamplingTable(params, list(range(12)))
    for step in range(20):
        logits = 3 * torch.randn(12, 500, generator=generator)
        expected = table.draw(logits, [step] * 12)
        u = uniforms(torch.arange(12), torch.full((12,), step))
        tokens, logprobs = plain_draw(logits, *table.padded(12), u)
        assert torch.equal(tokens, expected.tokens)
        assert torch.equal(logprobs, expected.logprobs)


def test_token_frequencies_follow_the_scaled_distribution():
    """Chi-square of 20,000 draws over 16 tokens; 44 is the 0.01 % point of 15 degrees of freedom."""
    logits = torch.linspace(-1.5, 1.5, 16)
    n = 20_000
    u = uniforms(torch.arange(n), torch.zeros(n, dtype=torch.long))
    temperature = 0.8
    rows = logits.expand(n, 16)
    tokens, logprobs = plain_draw(rows, torch.full((n,), temperature), torch.zeros(n, dtype=torch.bool), u)
    expected = (logits.double() / temperature).softmax(-1)
    counts = torch.bincount(tokens, minlength=16)
    assert float(((counts - n * expected) ** 2 / (n * expected)).sum()) < 44
    assert torch.allclose(logprobs.double(), expected.log()[tokens], atol=1e-6)
