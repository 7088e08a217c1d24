"""One real engine for the tests that change no weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.experiments.stage import LoopEngine, open_engine


@pytest.fixture(scope="session")
def engine(tiny_checkpoint: Path) -> Iterator[LoopEngine]:
    with open_engine(tiny_checkpoint) as found:
        yield found
