"""The loss scale of fp16 training, against its rule by hand, and a step against fp32."""

from __future__ import annotations

import math

import pytest
import torch

from areno.engine.model.loading import LoadOptions
from areno.engine.role import load_role
from areno.engine.train.loss_scale import LossScale
from areno.engine.train.optimizer import OptimizerOptions
from areno.engine.train.state_files import SavedState
from areno.loss_fns import sft_loss_fn
from tests.engine.test_equivalences import rows
from tests.support.optimizer_states import saved


def test_the_scale_falls_after_overflows_and_rises_after_a_window():
    scale = LossScale(value=64.0, least=8.0, window=3, hysteresis=2)
    seen = []
    for finite in (0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0):
        scale.update(bool(finite))
        seen.append(scale.value)
    # One overflow is tolerated, each further one halves; three good steps double, and one is tolerated again.
    assert seen == [64, 32, 16, 16, 16, 32, 32, 32, 32, 64, 64, 32, 16, 8, 8]
    assert not scale.may_fall


def role_of(path, dtype, scale=None):
    config = OptimizerOptions(lr=1e-3, eps=1e-6, grad_clip_norm=0.5, loss_scale=scale)
    return load_role("actor", str(path), "policy", LoadOptions(dtype=dtype), config, True)


def test_a_scaled_step_matches_fp32(tiny_checkpoint):
    half, full = (
        role_of(tiny_checkpoint, torch.float16, LossScale(value=2.0**10)),
        role_of(tiny_checkpoint, torch.float32),
    )
    for step in range(3):
        batch = rows(6, seed=step)
        found, expected = (role.training.run(batch, sft_loss_fn, 3) for role in (half, full))
        assert found["loss"] == pytest.approx(expected["loss"], rel=2e-2)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-2)
        assert found["loss_scale"] == 2.0**10
        assert "loss_scale" not in expected


def test_steps_that_overflow_are_skipped_until_the_scale_fits(tiny_checkpoint, tmp_path):
    role = role_of(tiny_checkpoint, torch.float16, LossScale(value=2.0**30, window=4, hysteresis=1))
    before = [p.detach().clone() for _, p in role.model.parameters()]
    skipped, scales = [], []
    for step in range(25):
        stats = role.training.run(rows(4, seed=step), sft_loss_fn, 4)
        skipped.append(stats["update_skipped"])
        scales.append(stats["loss_scale"])
        if skipped[-1]:
            assert all(torch.equal(p, old) for (_, p), old in zip(role.model.parameters(), before, strict=True))
            assert not math.isfinite(stats["grad_norm"])
        else:
            break
    count = len(skipped) - 1
    assert count >= 5
    assert scales == [2.0 ** (30 - step) for step in range(count + 1)]
    assert role.optimizer.steps == 1
    again = role_of(tiny_checkpoint, torch.float16, LossScale())
    again.optimizer.load_state(SavedState(saved(role.optimizer)))
    assert again.optimizer.loss_scale == role.optimizer.loss_scale
