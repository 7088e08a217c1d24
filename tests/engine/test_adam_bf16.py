"""AdamW with bf16 moments: the second moment follows the exact recursion, although each step changes it only slightly."""

from __future__ import annotations

import pytest
import torch

from areno.engine.train.adam_bf16 import AdamBf16

STEPS, BETA = 3000, 0.999


@pytest.mark.parametrize("largest", [0.0, 1.0])
def test_the_second_moment_follows_the_exact_recursion(largest):
    """With nearest rounding, it would stay at its first value without gradients, and settle at a quarter of g^2."""
    weights = torch.nn.Parameter(torch.zeros(4096))
    optimizer = AdamBf16([weights], 1e-3, (0.9, BETA), 1e-8, 0.0)
    square = optimizer.moments_of(weights)["exp_avg_sq"]
    square.copy_(torch.linspace(0.5, 2.0, 4096))
    exact, weights.grad = square.double(), torch.linspace(0.0, largest, 4096)
    for _ in range(STEPS):
        optimizer.step()
        exact = BETA * exact + (1 - BETA) * weights.grad.double() ** 2
    ratios = square.double() / exact
    assert ratios.mean().item() == pytest.approx(1.0, abs=0.05)
    assert 0.5 < ratios.min().item() < ratios.max().item() < 1.6


def test_two_runs_round_alike():
    def run():
        weights = torch.nn.Parameter(torch.ones(100))
        optimizer = AdamBf16([weights], 1e-2, (0.9, BETA), 1e-8, 0.1)
        for step in range(20):
            weights.grad = torch.linspace(-1.0, 1.0, 100) * (step % 3)
            optimizer.step()
        return weights.detach(), optimizer.moments_of(weights)["exp_avg_sq"]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))
