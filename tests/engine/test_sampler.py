"""Sampling against exact distributions, and its independence of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from areno.engine.rollout.counter_rng import derive_seed, uniforms
from areno.engine.rollout.sampler import SamplingTable
from areno.types import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -30.0])
DRAWS = 40_000


def frequencies(params):
    table = SamplingTable([params] * DRAWS, list(range(DRAWS)))
    draw = table.draw(LOGITS.expand(DRAWS, -1), [0] * DRAWS)
    return torch.bincount(draw.tokens, minlength=len(LOGITS)).double() / DRAWS, draw


def chi_square(observed, expected):
    kept = expected > 1e-6
    return float((DRAWS * (observed[kept] - expected[kept]) ** 2 / expected[kept]).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_gives_the_exact_distribution(temperature):
    observed, draw = frequencies(SamplingParams(temperature=temperature))
    expected = (LOGITS.double() / temperature).softmax(-1)
    assert chi_square(observed, expected) < 25  # 5 degrees of freedom: p about 1e-4
    exact = (LOGITS.double() / temperature).log_softmax(-1)[draw.tokens]
    assert (draw.logprobs - exact).abs().max() < 1e-5
    assert draw.cut_mass is None


def test_top_k_keeps_the_k_most_likely_and_reports_what_it_cut():
    observed, draw = frequencies(SamplingParams(top_k=2))
    probabilities = LOGITS.double().softmax(-1)
    expected = torch.where(torch.arange(6) < 2, probabilities, 0.0)
    assert observed[2:].sum() == 0
    assert chi_square(observed, expected / expected.sum()) < 15
    assert draw.cut_mass[0].item() == pytest.approx(float(1 - expected.sum()), abs=1e-5)
    assert (draw.logprobs - probabilities.log()[draw.tokens]).abs().max() < 1e-5, (
        "log-probs are of the unfiltered policy"
    )


@pytest.mark.parametrize("top_p", [0.3, 0.62, 0.9])
def test_top_p_keeps_the_smallest_prefix_that_reaches_p(top_p):
    observed, _ = frequencies(SamplingParams(top_p=top_p))
    probabilities = LOGITS.double().softmax(-1)
    size = 1 + int((probabilities.cumsum(0) < top_p).sum())
    expected = torch.where(torch.arange(6) < size, probabilities, 0.0)
    assert observed[size:].sum() == 0
    assert (observed[:size] > 0).all()
    assert chi_square(observed, expected / expected.sum()) < 25


def test_top_k_applies_before_top_p():
    observed, _ = frequencies(SamplingParams(top_k=3, top_p=0.8))
    three = LOGITS.double()[:3].softmax(-1)
    size = 1 + int((three.cumsum(0) < 0.8).sum())
    assert (observed[:size] > 0).all()
    assert observed[size:].sum() == 0


def test_rows_with_different_parameters_do_not_influence_each_other():
    params = [
        SamplingParams(greedy=True),
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.5),
    ]
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    together = SamplingTable(params, [1, 2, 3, 4]).draw(logits, [5, 6, 7, 8])
    for row, param in enumerate(params):
        alone = SamplingTable([param], [row + 1]).draw(logits[row : row + 1], [row + 5])
        assert together.tokens[row] == alone.tokens[0]
        assert together.logprobs[row] == alone.logprobs[0]
    assert together.tokens[0] == logits[0].argmax()
    assert together.logprobs[0].item() == pytest.approx(logits[0].log_softmax(-1).max().item(), abs=1e-6)


def test_a_token_of_zero_probability_is_never_drawn():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(20_000, -1)
    draw = SamplingTable([SamplingParams()] * 20_000, list(range(20_000))).draw(logits, [0] * 20_000)
    assert set(draw.tokens.tolist()) == {1, 3}


def test_uniforms_are_uniform_and_uncorrelated():
    for numbers in (uniforms([5] * 50_000, range(50_000)), uniforms(range(50_000), [3] * 50_000)):
        assert abs(numbers.mean() - 0.5) < 0.01
        assert abs(numbers.var() * 12 - 1) < 0.03
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    assert uniforms([1, 2], [3, 4]).tolist() == [uniforms([1], [3])[0], uniforms([2], [4])[0]]


def test_derived_seeds_differ_and_repeat():
    seeds = {derive_seed(a, b, c) for a in range(5) for b in range(20) for c in range(20)}
    assert len(seeds) == 2000
    assert derive_seed(1, 2, 3) == derive_seed(1, 2, 3) != derive_seed(1, 3, 2)
