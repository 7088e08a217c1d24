"""Servers shared by many tests, because starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.running import Reference, Running, running, save_sharp_checkpoint, save_taught_checkpoint


@pytest.fixture(scope="session")
def sharp_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharp_checkpoint(tmp_path_factory.mktemp("sharp") / "model")


@pytest.fixture(scope="session")
def taught_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_taught_checkpoint(tmp_path_factory.mktemp("taught") / "model")


@pytest.fixture(scope="session")
def server(sharp_checkpoint: Path) -> Iterator[Running]:
    """A server with a random model."""
    with running(
        sharp_checkpoint,
        *("--served-model-name", "tiny", "--max-running-prompts", 8, "--max-queue", 24, "--kv-cache-tokens", 40000),
    ) as running_server:
        yield running_server


@pytest.fixture(scope="session")
def taught(taught_checkpoint: Path) -> Iterator[Running]:
    """A server with a model that has memorized its answers."""
    with running(taught_checkpoint, "--served-model-name", "taught", "--kv-cache-tokens", 40000) as running_server:
        yield running_server


@pytest.fixture(scope="session")
def reference(sharp_checkpoint: Path) -> Reference:
    return Reference(sharp_checkpoint)
