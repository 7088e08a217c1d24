"""Recorded routing is replayed in every layout; the ground truth is the engine in one process."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import load_file

from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.engine.parallel.group import EngineGroup
from areno.engine.parallel.layout import Layout
from areno.engine.train.optimizer import OptimizerOptions
from areno.loss_fns import sft_loss_fn
from areno.types import Request, SamplingParams
from tests.engine.parallel.test_layouts import assert_weights
from tests.engine.test_routing_replay import PROMPT, rows_of
from tests.support.tiny import save_tiny_checkpoint

LAYOUTS = {
    "d2": Layout(2),
    "t2": Layout(1, 2),
    "fsdp": Layout(2, fsdp=True),
    "c2": Layout(cp_size=2),
    "e2": Layout(2, ep_size=2),
    "p2": Layout(pp_size=2),
}
ASKED = Request(PROMPT, SamplingParams(max_new_tokens=6, ignore_eos=True), [1, 2])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("ckpt") / "moe", "qwen3_moe", heads=4, hidden=64)


def course(engine, folder):
    """Return statistics, scores and weights of a step on rows with random recorded experts."""
    rows = rows_of(prompts=3)
    rows[4].routed_experts = None
    records = [row.routed_experts for row in rows]
    found = {"logprobs": engine.score_logprobs("actor", [row.tokens for row in rows], micro_bs=2, routed=records)}
    found["stats"] = engine.train(rows, sft_loss_fn, 2)
    engine.save_model(folder)
    return found | {"weights": load_file(folder / "model.safetensors")}


def config():
    # Without tree training: which rows share tokens, and how often a choice counts, would depend on the layout.
    options = {"optimizer": OptimizerOptions(lr=1e-3, eps=1e-6), "kv_cache_tokens": 1024, "tree_training": False}
    return EngineConfig(return_routed_experts=True, activation_checkpointing=True, **options)


@pytest.fixture(scope="module")
def truth(checkpoint, tmp_path_factory):
    alone = Engine(str(checkpoint), config())
    spoken = alone.submit([ASKED])[0].result(60)
    found = course(alone, tmp_path_factory.mktemp("alone"))
    alone.close()
    return found | {"spoken": spoken.sequences}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_replays_the_same_routing(checkpoint, truth, tmp_path, name):
    group = EngineGroup(str(checkpoint), config(), LAYOUTS[name])
    try:
        if LAYOUTS[name].pp_size == 1:
            spoken = group.submit([ASKED])[0].result(60).sequences
            group.end_rollout()
            for got, expected in zip(spoken, truth["spoken"], strict=True):
                assert got.resp_tokens == expected.resp_tokens
                assert np.array_equal(got.routed_experts, expected.routed_experts)
        found = course(group, tmp_path)
    finally:
        group.close()
    for got, expected in zip(found["logprobs"], truth["logprobs"], strict=True):
        assert got == pytest.approx(expected, abs=2e-5)
    assert found["stats"]["routed_experts_changed"] == pytest.approx(truth["stats"]["routed_experts_changed"])
    assert found["stats"]["loss"] == pytest.approx(truth["stats"]["loss"], rel=1e-5)
    assert_weights(found["weights"], truth["weights"])
