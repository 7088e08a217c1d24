"""A real engine for tests that change no weights, and small PPO runs whose rollout engine lives in the test process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.stage import LoopEngine, open_engine
from tests.experiments.trainer_stage import InProcessTrainer, RolloutRun, settings_of_kind


@pytest.fixture(scope="session")
def engine(tiny_checkpoint: Path) -> Iterator[LoopEngine]:
    with open_engine(tiny_checkpoint) as found:
        yield found


@pytest.fixture
def rl(tiny_checkpoint, tmp_path) -> Callable[..., RolloutRun]:
    """Runs PPO with settings by dotted name."""
    numbers = iter(range(1000))

    def run(
        changes: dict[str, Any] | None = None,
        watch: Callable[[InProcessTrainer], None] | None = None,
        workflow: Any = None,
        **more: Any,
    ) -> RolloutRun:
        root = tmp_path / str(next(numbers))
        config = settings_of_kind("rl", tiny_checkpoint, root, {"total_train_steps": 1, **(changes or {}), **more})
        with InProcessTrainer(config) as trainer:
            batches: list[Any] = []
            prepare = trainer.dispatcher.prepare_batch
            trainer.dispatcher.prepare_batch = lambda *given: batches.append(prepare(*given)) or batches[-1]  # type: ignore[method-assign]
            if watch is not None:
                watch(trainer)
            trainer.train(workflow)
            found = RolloutRun(trainer)
            found.batches = batches
            return found

    return run
