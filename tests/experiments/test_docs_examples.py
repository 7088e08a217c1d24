"""The programs of docs/workflows.md and docs/async.md run unchanged."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from areno.rollouts.dispatcher import BatchDispatcher
from areno.rollouts.engine_client import EngineClient
from areno.rollouts.staleness import StalenessManager
from areno.rollouts.workflows.resolve import resolve_workflow
from areno.rollouts.workflows.rlvr import RLVRWorkflow
from tests.experiments.stage import Generation, open_engine

DOCS = Path(__file__).parents[2] / "docs"
ROWS = [{"prompt": f"What is {a} plus 1?", "answer": str(a + 1)} for a in range(50)]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def shown(tmp_path: Path) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    for page in ("workflows.md", "async.md"):
        for block in blocks(page):
            exec(compile(block, page, "exec"), names)
    return names


@pytest.mark.parametrize("name", ["last_number", "Shorter", "Guesser"])
def test_the_workflows_make_a_batch(shown, engine, name):
    gconfig = Generation(max_new_tokens=12, ignore_eos=False)
    given: dict[str, tuple[Any, dict[str, Any]]] = {
        "last_number": (RLVRWorkflow(shown["last_number"], gconfig, engine.tokenizer), {}),
        "Shorter": (shown["Shorter"], {"gconfig": gconfig, "tokenizer": engine.tokenizer}),
        "Guesser": (shown["Guesser"], {}),
    }
    workflow, kwargs = given[name]
    resolved = resolve_workflow(workflow, gconfig, workflow_kwargs=kwargs)
    with BatchDispatcher(EngineClient(engine), StalenessManager(consumer_batch_size=2)) as dispatcher:
        assert len(dispatcher.prepare_batch(iter(ROWS), resolved).trajectories) == 2


def test_the_training_program_runs(shown, tiny_checkpoint):
    seen = []
    with open_engine(tiny_checkpoint) as engine:

        def update(rows: Any, version: int) -> None:
            seen.append(len(rows))
            with engine.loop.weights_changing(version), torch.no_grad():
                for parameter in engine.inner.actor.model.module.parameters():
                    parameter.mul_(1.01)

        workflow = resolve_workflow(shown["Guesser"], Generation(max_new_tokens=5), n_samples=1)
        counts = shown["train"](engine, workflow, iter(itertools.cycle(ROWS)), 3, update, 1)
    assert all(rows >= 8 for rows in seen)
    assert counts["accepted"] >= 24
    assert counts["failed"] == 0
