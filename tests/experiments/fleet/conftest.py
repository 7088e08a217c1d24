"""Fixtures: a tiny policy, its trainer, and fleets that are closed after the test."""

from __future__ import annotations

import pytest

from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.engine.train.optimizer import OptimizerOptions
from areno.rollouts.fleet.fleet import FleetOptions, RolloutFleet
from tests.support.tiny import save_tiny_checkpoint


def config(**more) -> EngineConfig:
    return EngineConfig(
        **{
            "optimizer": OptimizerOptions(lr=1e-2),
            "kv_cache_tokens": 8192,
            "decode": "eager",
            "max_running": 16,
            **more,
        }
    )


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    """Qwen3 with tied embeddings, so that one tensor has two names, and enough heads for two ranks."""
    return save_tiny_checkpoint(
        tmp_path_factory.mktemp("ckpt") / "qwen3", "qwen3", heads=4, hidden=64, tie_word_embeddings=True
    )


@pytest.fixture
def trainer(policy):
    engine = Engine(str(policy), config())
    yield engine
    engine.close()


@pytest.fixture
def open_fleet(policy, tmp_path):
    opened = []

    def make(config_of=None, weights=None, path=policy, **options) -> RolloutFleet:
        settings = {"replicas": 1, "log_folder": tmp_path / "logs", "backoff_s": 0.1, **options}
        fleet = RolloutFleet(str(path), config_of or config(), FleetOptions(**settings), weights)
        opened.append(fleet)
        return fleet

    yield make
    for fleet in opened:
        fleet.close()
