"""Faults of workflows and callers that the dispatcher must report: cancelled episodes, restored rows and failing cleanup."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from areno.errors import UsageError
from areno.rollouts.engine_client import EngineClient
from areno.rollouts.tasks import RolloutStoppedError
from tests.experiments.test_dispatcher import Ticking, dispatching, row_numbers, rows_of


def test_an_episode_that_is_cancelled_by_its_own_code_has_failed(caplog):
    class Leaking(Ticking):
        async def arun_episode(self, engine: EngineClient, data: dict[str, Any]) -> Any:
            if data["fate"] == "closed executor":
                future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                future.cancel()
                await future
            if data["fate"] == "leaked scope":
                asyncio.current_task().cancel()
            return await super().arun_episode(engine, data)

    message = r"3 raised.*(?s:.*)AgentError: the workflow cancelled its own episode"
    with dispatching(max_errors_in_a_row=3) as (dispatcher, _), pytest.raises(RolloutStoppedError, match=message):
        dispatcher.prepare_batch(rows_of(["closed executor", "leaked scope"], [1]), Leaking())
    with dispatching(batch=2) as (dispatcher, _):
        batch = dispatcher.prepare_batch(rows_of(["leaked scope", "", ""], [1]), Leaking())
        assert sorted(row_numbers(batch)) == [1, 2]
        assert dispatcher.statistics()["failed"] == dispatcher.statistics()["rejected"] == 1
    assert "episode 0 failed and is dropped" in caplog.text


def test_restored_rows_are_not_forgotten_by_an_evaluation():
    with dispatching(batch=1, eta=2, most=1) as (dispatcher, _):
        rows = rows_of([""], [5])
        used = row_numbers(dispatcher.prepare_batch(rows, Ticking()))
        state = dispatcher.export_state()
        assert state["waiting"]
    with dispatching(batch=1, eta=2, most=1, stall_timeout_s=5) as (dispatcher, engine):
        dispatcher.load_state(state)
        with pytest.raises(
            UsageError, match=r"still holds rows from prepare_batch or load_state; use a separate dispatcher"
        ):
            dispatcher.rollout_batch([next(rows)], Ticking())
        engine.set_version(1)
        dispatcher.set_version(1)
        assert used + row_numbers(dispatcher.prepare_batch(rows, Ticking())) == [0, 1]


def test_an_evaluation_does_not_wait_behind_rows_that_were_read_ahead():
    with dispatching(batch=1, eta=1, most=1, stall_timeout_s=5) as (dispatcher, engine):
        rows = rows_of([""], [1])
        used = row_numbers(dispatcher.prepare_batch(rows, Ticking()))
        with pytest.raises(
            UsageError, match=r"still holds rows from prepare_batch or load_state; use a separate dispatcher"
        ):
            dispatcher.rollout_batch([{"row": 99, "ticks": 1}], Ticking())
        for version in (1, 2, 3):
            engine.set_version(version)
            dispatcher.set_version(version)
            used += row_numbers(dispatcher.prepare_batch(rows, Ticking()))
        assert used == [0, 1, 2, 3]


def test_close_closes_every_workflow_even_if_one_cannot_be_closed(caplog):
    class Closing(Ticking):
        async def aclose(self) -> None:
            closed.append(self.name)
            if self.name == "broken":
                raise RuntimeError("no such session")

    closed: list[str] = []
    with dispatching(batch=1) as (dispatcher, _):
        for name in ("broken", "other"):
            dispatcher.rollout_batch([{"row": 0, "ticks": 1}], Closing(name))
    assert closed == ["broken", "other"]
    assert "a workflow could not be closed: RuntimeError: no such session" in caplog.text
    assert not [thread for thread in threading.enumerate() if thread.name == "areno-episodes"]
