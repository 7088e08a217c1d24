"""One trainer for the tests that do not depend on what the model says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from areno import Trainer
from tests.agentic.stage import open_trainer


@pytest.fixture(scope="session")
def trainer(tiny_checkpoint: Path) -> Iterator[Trainer]:
    with open_trainer(tiny_checkpoint) as opened:
        yield opened
