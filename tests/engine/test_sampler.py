"""Sampling against exact distributions, and its independence of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from areno.engine.rollout import filters
from areno.engine.rollout.counter_rng import derive_seed, uniforms
from areno.engine.rollout.filters import Filters
from areno.engine.rollout.logit_edits import LogitEdits
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


def test_integer_temperatures_are_those_of_equal_floats():
    for temperature in (1, 2):
        whole, fraction = (
            frequencies(SamplingParams(temperature=temperature))[1],
            frequencies(SamplingParams(temperature=float(temperature)))[1],
        )
        assert torch.equal(whole.tokens, fraction.tokens)
        assert torch.equal(whole.logprobs, fraction.logprobs)
    table = SamplingTable([SamplingParams(temperature=1)], [0])
    assert table.temperatures.dtype == torch.float32  # compiled decode steps and GPU kernels read it as such


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


def test_seeds_may_be_numbers_of_numpy():
    for seed in (-3, 7, 2**62):
        assert derive_seed(np.int64(seed), 1) == derive_seed(seed, 1)
        assert uniforms([np.int64(seed)], [5]) == uniforms([seed], [5])


# -- filters and edits -------------------------------------------------------------------------------------------------


def kept_by_sorting(weights, top_k, top_p, min_p):
    """Return the tokens kept by definition, with a stable sort: top-k, then top-p of the rest, then min-p."""
    order = torch.sort(weights, descending=True, stable=True).indices.tolist()
    kept = order[:top_k] if top_k > 0 else order
    total = sum(float(weights[i]) for i in kept)
    nucleus, mass = [], 0.0
    for index in kept:
        if mass >= top_p * total and top_p < 1:
            break
        nucleus.append(index)
        mass += float(weights[index])
    return sorted(i for i in nucleus if weights[i] >= min_p * weights.max())


@pytest.mark.parametrize("vocab", [5, 97, 1000])
def test_filters_keep_what_sorting_keeps_even_with_ties_and_among_other_rows(vocab):
    own = torch.Generator().manual_seed(vocab)
    choices = [(k, p, m) for k in (-1, 1, 3, 400) for p in (1.0, 0.05, 0.5, 0.99) for m in (0.0, 0.2)]
    params = [SamplingParams(top_k=k, top_p=p, min_p=m) for k, p, m in choices]
    weights = (torch.randn(len(params), vocab, generator=own) * 3).exp()
    weights[::3] = torch.randint(1, 4, (len(weights[::3]), vocab), generator=own).float()  # many ties
    weights /= weights.amax(-1, keepdim=True)
    together = Filters(params, "cpu").apply(weights.clone())
    for row, (k, p, m) in enumerate(choices):
        expected = kept_by_sorting(weights[row], k, p, m)
        assert together[row].nonzero()[:, 0].tolist() == expected, (k, p, m)
        assert torch.equal(together[row][expected], weights[row][expected])
        alone = Filters([params[row]], "cpu").apply(weights[row : row + 1].clone())
        assert torch.equal(alone[0], together[row])


def test_a_nucleus_beyond_the_first_candidates_is_found():
    weights = torch.ones(1, 4 * filters.FIRST_CANDIDATES)
    kept = Filters([SamplingParams(top_p=0.9)], "cpu").apply(weights)
    assert int((kept > 0).sum()) == math.ceil(0.9 * 4 * filters.FIRST_CANDIDATES)


def test_min_p_gives_the_exact_distribution():
    observed, _ = frequencies(SamplingParams(min_p=0.2))
    probabilities = LOGITS.double().softmax(-1)
    expected = torch.where(probabilities >= 0.2 * probabilities.max(), probabilities, 0.0)
    assert (expected > 0).sum() == 3
    assert chi_square(observed, expected / expected.sum()) < 20


@pytest.mark.parametrize("vocab", [7, 300, 5000])
def test_block_draws_follow_the_distribution_and_hit_every_region(vocab):
    own = torch.Generator().manual_seed(1)
    logits = torch.randn(vocab, generator=own)
    rows = 4000
    counts = torch.zeros(vocab)
    for seed in range(10):
        table = SamplingTable([SamplingParams()] * rows, list(range(seed * rows, (seed + 1) * rows)))
        counts += torch.bincount(table.draw(logits.expand(rows, -1), [0] * rows).tokens, minlength=vocab)
    expected = logits.double().softmax(-1) * rows * 10
    order = expected.argsort()
    bins = torch.tensor_split(order, min(vocab, 40))
    statistic = sum(float((counts[b].sum() - expected[b].sum()) ** 2 / expected[b].sum()) for b in bins)
    degrees = len(bins) - 1
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5


def penalized(logits, prompt, output, params):
    """Return the logits edited by definition, token by token."""
    edited = logits.clone().double()
    for token in range(len(logits)):
        if token in prompt or token in output:
            edited[token] = (
                edited[token] / params.repetition_penalty
                if edited[token] > 0
                else edited[token] * params.repetition_penalty
            )
        count = output.count(token)
        edited[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        edited[token] += (params.logit_bias or {}).get(token, 0.0)
    return edited


def test_penalties_and_biases_follow_their_definitions_and_change_only_their_row():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(2)) * 2
    params = SamplingParams(
        presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.7, logit_bias={3: 4.0, 5: -100.0}
    )
    prompt, output = [1, 2, 2, 30], [2, 7, 7, 9]
    edits = LogitEdits(params, prompt, None)
    assert edits.apply(logits[0]).tolist() == pytest.approx(penalized(logits[0], prompt, [], params).tolist(), abs=1e-5)
    for token in output:
        edits.push(token)
    expected = penalized(logits[0], prompt, output, params)
    assert edits.apply(logits[0]).tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    greedy = SamplingParams(greedy=True)
    table = SamplingTable([params, SamplingParams(), greedy], [1, 2, 3], edits=[edits, None, None])
    draw = table.draw(logits, [0, 0, 0])
    plain = SamplingTable([SamplingParams(), greedy], [2, 3]).draw(logits[1:], [0, 0])
    assert draw.tokens[1:].tolist() == plain.tokens.tolist()
    assert draw.logprobs[0].item() == pytest.approx(logits[0].log_softmax(-1)[draw.tokens[0]].item(), abs=1e-5)
    rows = 20_000
    many = SamplingTable([params] * rows, list(range(rows)), edits=[edits] * rows)
    observed = torch.bincount(many.draw(logits[:1].expand(rows, -1), [0] * rows).tokens, minlength=40) / rows
    assert (observed - expected.softmax(-1)).abs().max() < 0.015


class OnlyEven:
    """A grammar: even tokens, three of them."""

    def __init__(self):
        self.taken = []

    def allowed(self):
        return np.arange(40) % 2 == 0

    def forces(self, token):
        return token == 6

    def push(self, token):
        self.taken.append(token)

    @property
    def finished(self):
        return len(self.taken) == 3


@pytest.mark.parametrize("greedy", [False, True])
def test_a_grammar_rules_tokens_out(greedy):
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(3))
    logits[0, 1] = 50.0
    params = SamplingParams(greedy=greedy)
    seen = set()
    for seed in range(50):
        edits = LogitEdits(params, [1], OnlyEven())
        seen.add(int(SamplingTable([params], [seed], edits=[edits]).draw(logits, [0]).tokens[0]))
    assert all(token % 2 == 0 for token in seen)
    assert greedy == (seen == {int(logits[0, ::2].argmax()) * 2})


@pytest.mark.parametrize("greedy", [False, True])
def test_a_grammar_may_end_a_response_before_its_minimum_length(greedy):
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(3))
    params = SamplingParams(greedy=greedy, min_new_tokens=5)
    evens = list(range(0, 40, 2))
    # The grammar must end in the first case, and need not in the second.
    for stop_ids, expected in ((evens, evens), (evens[:-1], evens[-1:])):
        edits = LogitEdits(params, [1], OnlyEven(), stop_ids)
        assert SamplingTable([params], [7], edits=[edits]).draw(logits, [0]).tokens[0] in expected


def test_what_a_grammar_removes_and_forces_is_reported():
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(5))
    params = SamplingParams(temperature=0.7)
    edits = LogitEdits(params, [1], OnlyEven())
    SamplingTable([params], [0], edits=[edits]).draw(logits, [0])
    assert edits.cut_mass == pytest.approx((logits[0].double() / 0.7).softmax(-1)[1::2].sum().item(), abs=1e-6)
    forced = []
    for token in (4, 6):
        edits.push(token)
        forced.append(edits.forced)
    assert forced == [False, True]


def test_top_logprobs_are_the_largest_ones():
    logits = torch.randn(2, 60, generator=torch.Generator().manual_seed(4))
    table = SamplingTable([SamplingParams(top_logprobs=4, temperature=0.5), SamplingParams()], [1, 2])
    tokens, values = table.draw(logits, [0, 0]).top
    exact = (logits[0].double() / 0.5).log_softmax(-1)
    assert tokens[0].tolist() == exact.topk(4).indices.tolist()
    assert values[0].tolist() == pytest.approx(exact.topk(4).values.tolist(), abs=1e-5)
