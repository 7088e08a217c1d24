"""Our CPU sampling kernel against the softmax in float64."""

from __future__ import annotations

import shutil

import pytest
import torch

from areno.engine.kernels import plain_draw
from areno.engine.rollout.inverse_cdf import block_size
from tests.support.threads import torch_threads

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")

KERNEL = plain_draw.KERNEL


def draw(logits, temperatures, greedy, u):
    return plain_draw.plain_draw(logits, temperatures, greedy, u, block_size(logits.shape[1]))


def inputs(rows, vocab):
    random = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(rows, vocab, generator=random)
    temperatures = torch.tensor([1.0, 0.5, 2.0])[torch.arange(rows) % 3]
    return logits, temperatures, torch.rand(rows, dtype=torch.float64, generator=random)


@pytest.mark.parametrize("vocab", [1, 5, 16, 17, 300, 600, 32_000])
def test_draws_invert_the_cumulative_distribution(vocab):
    logits, temperatures, u = inputs(60, vocab)
    tokens, logprobs = draw(logits, temperatures, torch.zeros(60, dtype=torch.bool), u)
    exact = torch.log_softmax(logits.double() / temperatures.double()[:, None], -1)
    upper = exact.exp().cumsum(-1).gather(1, tokens[:, None])[:, 0]
    lower = upper - exact.exp().gather(1, tokens[:, None])[:, 0]
    assert ((lower - 1e-6 <= u) & (u <= upper + 1e-6)).all()
    torch.testing.assert_close(logprobs.double(), exact.gather(1, tokens[:, None])[:, 0], atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_tokens_of_nonzero_probability(u):
    logits = torch.full((4, 300), -torch.inf)
    logits[:, 100:200] = torch.randn(4, 100)
    tokens, logprobs = draw(logits, torch.ones(4), torch.zeros(4, dtype=torch.bool), torch.full((4,), u).double())
    assert tokens.tolist() == [100 if u == 0 else 199] * 4
    assert logprobs.isfinite().all()


def test_greedy_rows_take_the_first_of_tied_tokens():
    logits, temperatures, u = inputs(9, 600)
    logits[:, [70, 300, 599]] = 50.0
    greedy = torch.arange(9) % 2 == 0
    tokens, _ = draw(logits, temperatures, greedy, u)
    assert tokens[greedy].tolist() == [70] * 5


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_a_row_does_not_depend_on_other_rows(threads):
    logits, temperatures, u = inputs(20, 700)
    greedy = torch.arange(20) % 5 == 0
    with torch_threads(threads):
        tokens, logprobs = draw(logits, temperatures, greedy, u)
    for row in range(20):
        one = slice(row, row + 1)
        token, logprob = draw(logits[one], temperatures[one], greedy[one], u[one])
        assert (token[0], logprob[0]) == (tokens[row], logprobs[row])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_give_no_valid_logprob(bad):
    logits, temperatures, u = inputs(3, 300)
    logits[1, 7] = bad
    _, logprobs = draw(logits, temperatures, torch.zeros(3, dtype=torch.bool), u)
    assert not logprobs[1] > -torch.inf
    assert logprobs[[0, 2]].isfinite().all()


def test_other_types_are_refused():
    with pytest.raises(RuntimeError, match="fp32"):
        draw(torch.zeros(2, 30).bfloat16(), torch.ones(2), torch.zeros(2, dtype=torch.bool), torch.zeros(2).double())
