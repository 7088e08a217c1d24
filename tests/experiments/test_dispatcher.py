"""Batches from a simulated engine: real threads, no model."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areno.errors import DataError, EngineError, UsageError
from areno.rollouts.conversation.trajectory_rows import completion_row
from areno.rollouts.dispatcher import BatchDispatcher
from areno.rollouts.dump import TrajectoryDump
from areno.rollouts.engine_client import EngineClient, ModelRequest
from areno.rollouts.staleness import StalenessManager
from areno.rollouts.tasks import EpisodePlan, RolloutStoppedError
from areno.rollouts.trajectory import make_trajectory
from areno.rollouts.workflows.base import RolloutWorkflow
from tests.experiments.stage import Generation, TickEngine
from tests.support.examples import examples


class Ticking(RolloutWorkflow):
    """Generates as many tokens as the row says; the row's ``fate`` is the outcome."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    async def arun_episode(self, engine: EngineClient, data: dict[str, Any]) -> Any:
        answer = await engine.agenerate(ModelRequest([data["ticks"], data["row"]], Generation(max_new_tokens=200)))
        if data.get("fate") == "raise":
            raise RuntimeError(f"row {data['row']} is broken")
        if data.get("fate") == "none":
            return None
        return make_trajectory([(completion_row(answer.input_tokens, answer.sequence), float(data["row"]))])


class EpisodeCounts:
    """Independent counts, from the events that the dispatcher sends its listener."""

    def __init__(self, batch: int, eta: int, most: int, dynamic: bool) -> None:
        self.batch, self.eta, self.most, self.dynamic = batch, eta, most, dynamic
        self.version = self.running = self.kept = 0
        self.violations: list[str] = []
        self._lock = threading.Lock()

    def on_event(self, task_id: int, status: str, reason: str) -> None:
        with self._lock:
            if status == "running":
                self.running += 1
                if self.running > self.most:
                    self.violations.append(f"{self.running} run at once")
                if self.running + self.kept > (self.eta + self.version + 1) * self.batch:
                    self.violations.append(f"{self.running}+{self.kept} at version {self.version}")
                return
            if status == "dropped":
                self.kept -= 1
                return
            self.running -= 1
            self.kept += status == "accepted" or self.dynamic


def rows_of(fates: list[str], ticks: list[int]) -> Iterator[dict[str, Any]]:
    for row in itertools.count():
        yield {"row": row, "ticks": ticks[row % len(ticks)], "fate": fates[row % len(fates)]}


def row_numbers(batch: Any) -> list[int]:
    return [int(reward) for trajectory in batch.trajectories for reward in trajectory["rewards"]]


@contextmanager
def dispatching(
    batch: int = 2, eta: int = 0, most: int | None = None, dynamic: bool = False, **options: Any
) -> Iterator[tuple[BatchDispatcher, TickEngine]]:
    engine = TickEngine()
    staleness = StalenessManager(
        max_concurrent_rollouts=most,
        consumer_batch_size=batch,
        max_head_offpolicyness=eta,
        replaces_rejected=not dynamic,
    )
    try:
        with BatchDispatcher(EngineClient(engine), staleness, dynamic_bs=dynamic, **options) as dispatcher:
            yield dispatcher, engine
    finally:
        engine.close()


@given(
    batch=st.integers(1, 4),
    eta=st.integers(0, 3),
    most=st.integers(1, 8),
    dynamic=st.booleans(),
    bound=st.one_of(st.none(), st.integers(0, 2)),
    on_stale=st.sampled_from(["regenerate", "drop"]),
    fates=st.lists(st.sampled_from(["", "", "", "none", "raise"]), min_size=1, max_size=5).filter(lambda f: "" in f),
    ticks=st.lists(st.integers(1, 12), min_size=1, max_size=7),
)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_bounds_hold_for_any_outcome_of_episodes(batch, eta, most, dynamic, bound, on_stale, fates, ticks):
    counts = EpisodeCounts(batch, eta, most, dynamic)
    options = {"max_staleness": bound, "on_stale": on_stale, "listener": counts.on_event}
    options |= {
        "max_errors_in_a_row": 10**6,
        "max_rejections_in_a_row": 10**6,
    }  # by chance, many may fail in a row
    with dispatching(batch, eta, most, dynamic, **options) as (dispatcher, engine):
        rows, workflow, used = rows_of(fates, ticks), Ticking(), []
        for version in range(6):
            found = dispatcher.prepare_batch(rows, workflow)
            used += row_numbers(found)
            assert found.version == version
            assert len(found.trajectories) + found.rejected == batch
            assert found.rejected == 0 or dynamic
            for trajectory, staleness in zip(found.trajectories, found.staleness, strict=True):
                versions = trajectory["versions"][trajectory["versions"] >= 0].tolist()
                assert staleness == version - min(versions)
                assert versions == sorted(versions)
                assert bound is None or staleness <= bound
                assert eta > 0 or staleness == 0
            counts.version = version + 1
            engine.set_version(version + 1)
            dispatcher.set_version(version + 1)
        assert counts.violations == []
        assert max(Counter(used).values(), default=0) <= 1


def test_with_eta_zero_no_episode_starts_before_the_update():
    with dispatching(batch=3, eta=0, most=100) as (dispatcher, _):
        dispatcher.prepare_batch(rows_of([""], [1]), Ticking())
        time.sleep(0.05)
        assert dispatcher.staleness.stat.running == 0
        assert dispatcher.staleness.stat.accepted == 3
        dispatcher.set_version(1)
        assert dispatcher.staleness.stat.running + dispatcher.staleness.stat.accepted == 6


def test_generation_goes_on_while_nobody_waits():
    with dispatching(batch=2, eta=3, most=100) as (dispatcher, _):
        dispatcher.prepare_batch(rows_of([""], [1]), Ticking())
        deadline = time.monotonic() + 10
        while dispatcher.staleness.stat.accepted < 8 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert dispatcher.staleness.stat.accepted == 8


def test_episodes_are_used_in_the_order_in_which_they_started():
    """Row 0 takes long: eleven short rows end before it, but the next batch uses it before those that are left."""
    with dispatching(batch=2, eta=5, most=12) as (dispatcher, engine):
        rows, workflow = ({"row": row, "ticks": 300 if row == 0 else 1} for row in itertools.count()), Ticking()
        first = sorted(row_numbers(dispatcher.prepare_batch(rows, workflow)))
        deadline = time.monotonic() + 20
        while dispatcher.staleness.stat.accepted < 12 and time.monotonic() < deadline:
            time.sleep(0.005)
        engine.set_version(1)
        dispatcher.set_version(1)
        second = sorted(row_numbers(dispatcher.prepare_batch(rows, workflow)))
        assert [first, second] == [[1, 2], [0, 3]]


def test_batches_are_shuffled_by_the_seed():
    def order(seed: int) -> list[list[int]]:
        with dispatching(batch=8, seed=seed) as (dispatcher, engine):
            found, workflow, rows = [], Ticking(), rows_of([""], [2])
            for version in range(3):
                found.append(row_numbers(dispatcher.prepare_batch(rows, workflow)))
                engine.set_version(version + 1)
                dispatcher.set_version(version + 1)
            return found

    first, again, other = order(1), order(1), order(2)
    assert first == again
    assert first != other
    assert [sorted(batch) for batch in first] == [list(range(0, 8)), list(range(8, 16)), list(range(16, 24))]
    assert first[0] != sorted(first[0])


def test_dynamic_batches_count_rejected_episodes():
    with dispatching(batch=4, dynamic=True) as (dispatcher, engine):
        rows, workflow = rows_of(["", "none", "", "raise"], [1]), Ticking()
        for version in range(3):
            found = dispatcher.prepare_batch(rows, workflow)
            assert sorted(row_numbers(found)) == [4 * version, 4 * version + 2]
            assert found.rejected == 2
            engine.set_version(version + 1)
            dispatcher.set_version(version + 1)
        assert dispatcher.statistics()["empty"] == 3
        assert dispatcher.statistics()["failed"] == 3


def test_the_filter_sees_the_whole_group_and_rejected_rows_are_replaced():
    with dispatching(batch=3) as (dispatcher, _):
        found = dispatcher.prepare_batch(rows_of([""], [1]), Ticking(), lambda x: bool(x["rewards"].mean() % 2 == 1))
        assert sorted(row_numbers(found)) == [1, 3, 5]
        assert dispatcher.statistics()["filtered"] >= 3
        assert dispatcher.statistics()["failed"] == 0


def test_no_episode_starts_during_a_pause():
    with dispatching(batch=2, eta=1, most=2) as (dispatcher, _):
        timer = threading.Timer(0.15, dispatcher.resume)
        dispatcher.pause()
        began = time.monotonic()
        timer.start()
        dispatcher.prepare_batch(rows_of([""], [1]), Ticking())
        assert time.monotonic() - began >= 0.15


def test_a_run_whose_episodes_all_raise_stops_with_the_first_exception():
    with dispatching(batch=2, max_errors_in_a_row=5) as (dispatcher, _):
        with pytest.raises(RolloutStoppedError) as caught:
            dispatcher.prepare_batch(rows_of(["raise"], [1]), Ticking())
        text = str(caught.value)
        assert "5 raised" in text
        assert "RuntimeError: row 0 is broken" in text
        assert "test_dispatcher.py" in text  # where it was raised
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert dispatcher.statistics()["failed"] <= 7


def test_a_run_whose_filter_rejects_everything_stops_and_says_so():
    refused = pytest.raises(
        RolloutStoppedError, match=r"9 rejected by the filter.*check the reward function and the trajectory filter"
    )
    with dispatching(batch=2, max_rejections_in_a_row=9) as (dispatcher, _), refused:
        dispatcher.prepare_batch(rows_of([""], [1]), Ticking(), lambda _: False)


def test_errors_between_accepted_episodes_do_not_stop_the_run():
    with dispatching(batch=20, max_errors_in_a_row=2, max_rejections_in_a_row=2, most=1) as (dispatcher, _):
        found = dispatcher.prepare_batch(rows_of(["", "raise"], [1]), Ticking())
        assert sorted(row_numbers(found)) == list(range(0, 40, 2))


def test_a_filter_that_raises_is_counted_like_a_workflow_that_does():
    def broken(trajectory: Any) -> bool:
        raise KeyError("no such key")

    with (
        dispatching(batch=2, max_errors_in_a_row=3) as (dispatcher, _),
        pytest.raises(RolloutStoppedError, match="KeyError"),
    ):
        dispatcher.prepare_batch(rows_of([""], [1]), Ticking(), broken)


def test_running_out_of_rows_is_an_error_and_not_a_hang():
    with (
        dispatching(batch=4) as (dispatcher, _),
        pytest.raises(DataError, match="no rows are left, but only 3 of 4 episodes are ready"),
    ):
        dispatcher.prepare_batch(itertools.islice(rows_of([""], [1]), 3), Ticking())


def test_a_missing_set_version_is_an_error_and_not_a_hang():
    with dispatching(batch=2) as (dispatcher, _):
        rows, workflow = rows_of([""], [1]), Ticking()
        dispatcher.prepare_batch(rows, workflow)
        with pytest.raises(
            EngineError, match=r"batch 1 .*the staleness limit allows no further episodes.*call set_version"
        ):
            dispatcher.prepare_batch(rows, workflow)


def test_a_stalled_wait_says_what_it_waits_for(caplog):
    class Stuck(RolloutWorkflow):
        async def arun_episode(self, engine: EngineClient, data: dict[str, Any]) -> Any:
            await asyncio.sleep(1000)

    with (
        dispatching(batch=2, stall_report_s=0.1, stall_timeout_s=1.5) as (dispatcher, _),
        pytest.raises(
            EngineError,
            match=r"waiting for batch 0 .*there was no progress for 1.5 s \(0 of 2 episodes ready; 2 running",
        ),
    ):
        dispatcher.prepare_batch(rows_of([""], [1]), Stuck())
    assert "the oldest running episode (0) started" in caplog.text


def test_a_new_workflow_applies_to_the_whole_batch_that_the_call_returns():
    class Named(Ticking):
        async def arun_episode(self, engine: EngineClient, data: dict[str, Any]) -> Any:
            trajectory = await super().arun_episode(engine, data)
            return {**trajectory, "made_by": [self.name]}

    first, second = Named("first"), Named("second")
    with dispatching(batch=2, eta=2, most=4) as (dispatcher, engine):
        rows = rows_of([""], [1, 30, 1, 1, 30])
        used = row_numbers(dispatcher.prepare_batch(rows, first))
        deadline = time.monotonic() + 10
        while dispatcher.staleness.stat.accepted < 4 and time.monotonic() < deadline:
            time.sleep(0.002)  # some have finished, some are running
        for version in (1, 2):
            engine.set_version(version)
            dispatcher.set_version(version)
            found = dispatcher.prepare_batch(rows, second, lambda x: x["made_by"] == ["second"])
            assert [trajectory["made_by"] for trajectory in found.trajectories] == [["second"], ["second"]]
            used += row_numbers(found)
        assert dispatcher.statistics()["restarted"] > 0
        assert dispatcher.statistics()["filtered"] == 0
        assert len(set(used)) == 6  # and no row is lost or used twice
        assert max(used) < 10


@given(seed=st.integers(0, 2**32), eta=st.integers(0, 3), crash_after=st.integers(1, 4), dynamic=st.booleans())
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_after_a_crash_every_row_is_in_one_accepted_batch(seed, eta, crash_after, dynamic):
    """The data source continues where it was; rows that waited, ran or had finished are restored from the saved state."""
    import torch

    draw = random.Random(seed)
    ticks = [draw.randint(1, 10) for _ in range(11)]
    source, used, staleness = rows_of([""], ticks), [], []

    def train(dispatcher: BatchDispatcher, engine: TickEngine, first: int, last: int) -> None:
        workflow = Ticking()
        for version in range(first, last):
            engine.set_version(version)
            dispatcher.set_version(version)
            found = dispatcher.prepare_batch(source, workflow)
            used.extend(row_numbers(found))
            staleness.extend(found.staleness)

    with dispatching(3, eta, 5, dynamic) as (dispatcher, engine):
        train(dispatcher, engine, 0, crash_after)
        engine.set_version(crash_after)
        dispatcher.set_version(crash_after)
        time.sleep(draw.random() * 0.01)
        state = dispatcher.export_state()
    assert json.dumps([kept["data"] for kept in state["waiting"]])  # plain rows
    assert all(isinstance(kept["trajectory"]["input_ids"], torch.Tensor) for kept in state["finished"])
    with dispatching(3, eta, 5, dynamic) as (dispatcher, engine):
        dispatcher.load_state(state)
        assert dispatcher.version == crash_after
        assert dispatcher.staleness.capacity(crash_after) <= (eta + 1) * 3
        train(dispatcher, engine, crash_after, crash_after + 5)
        left = dispatcher.export_state()
    saved = [kept["data"]["row"] for kept in (*left["waiting"], *left["finished"])]
    everything = sorted(used + saved)
    assert everything == list(range(len(everything)))  # none lost, none twice


def test_a_row_that_was_running_when_the_state_was_saved_keeps_its_place_in_the_batch():
    """Row 4 takes long, rows 5 to 7 have finished. A batch is shuffled from the order in which its rows started."""

    def second_batch(crash: bool) -> list[int]:
        rows = ({"row": row, "ticks": 300 if row == 4 else 1} for row in itertools.count())
        workflow = Ticking()
        with dispatching(batch=4, seed=3) as (dispatcher, engine):
            dispatcher.prepare_batch(rows, workflow)
            for each in (engine, dispatcher):
                each.set_version(1)
            while dispatcher.staleness.stat.accepted < 7:
                time.sleep(0.001)
            state = dispatcher.export_state()
            if not crash:
                return row_numbers(dispatcher.prepare_batch(rows, workflow))
        with dispatching(batch=4, seed=3) as (dispatcher, _):
            dispatcher.load_state(state)
            state = dispatcher.export_state()  # as if stopped before any episode started
        with dispatching(batch=4, seed=3) as (dispatcher, engine):
            dispatcher.load_state(state)
            engine.set_version(1)
            return row_numbers(dispatcher.prepare_batch(rows, workflow))

    whole = second_batch(crash=False)
    assert sorted(whole) == [4, 5, 6, 7]
    assert second_batch(crash=True) == whole


def test_state_must_be_loaded_before_the_first_batch():
    with dispatching(batch=1) as (dispatcher, _):
        state = dispatcher.export_state()
        dispatcher.prepare_batch(rows_of([""], [1]), Ticking())
        with pytest.raises(UsageError, match="call load_state before the first batch"):
            dispatcher.load_state(state)


def test_an_evaluation_runs_all_rows_in_their_order():
    with dispatching(batch=2, eta=0, most=3) as (dispatcher, _):
        rows = list(itertools.islice(rows_of(["", "", "none"], [9, 1, 1]), 10))
        for _ in range(2):  # and leaves nothing behind
            found = dispatcher.rollout_batch(rows, Ticking())
            assert [int(trajectory["rewards"][0]) for trajectory in found] == [0, 1, 3, 4, 6, 7, 9]
        assert dispatcher.staleness.stat.accepted == 0


def test_repeated_evaluations_have_the_same_seeds():
    with dispatching(batch=2, most=3) as (dispatcher, engine):
        seeds, submit = [], engine.submit
        engine.submit = lambda requests: seeds.extend(requests[0].seeds) or submit(requests)
        rows = list(itertools.islice(rows_of([""], [2]), 5))
        for _ in range(2):
            dispatcher.run_rows(rows, EpisodePlan(Ticking()), repeats=True)
    assert len(set(seeds)) == 5
    assert sorted(seeds[:5]) == sorted(seeds[5:])


def test_close_cancels_what_runs_in_the_engine():
    with dispatching(batch=2) as (dispatcher, engine):
        thread = threading.Thread(target=_expect_closed, args=(dispatcher, rows_of([""], [10**6])))
        thread.start()
        deadline = time.monotonic() + 10
        while engine.load().running < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert engine.load().running == 2
        dispatcher.close()
        thread.join(10)
        assert not thread.is_alive()
        assert engine.load().running == 0
        assert not [t for t in threading.enumerate() if t.name == "areno-episodes"]


def _expect_closed(dispatcher: BatchDispatcher, rows: Iterator[dict[str, Any]]) -> None:
    with pytest.raises(EngineError, match="closed"):
        dispatcher.prepare_batch(rows, Ticking())


def test_queue_size_bounds_what_is_read_ahead():
    taken = []

    def rows() -> Iterator[dict[str, Any]]:
        for row in rows_of([""], [1]):
            taken.append(row["row"])
            yield row

    with dispatching(batch=2, eta=3, most=2, queue_size=1) as (dispatcher, _):
        dispatcher.pause()
        threading.Timer(0.1, lambda: (taken.append("resumed"), dispatcher.resume())).start()
        dispatcher.prepare_batch(rows(), Ticking())
    assert taken[: taken.index("resumed")] == [0]


def test_trajectories_are_dumped_as_documented(tmp_path):
    class Letters:
        @staticmethod
        def decode(tokens: list[int]) -> str:
            return " ".join(map(str, tokens))

    dump = TrajectoryDump(tmp_path, Letters())
    with dispatching(batch=2, dump=dump) as (dispatcher, engine):
        engine.set_version(4)
        dispatcher.prepare_batch(rows_of([""], [3]), Ticking())
    (line,) = (tmp_path / "4" / "1.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "task_id": 1,
        "sample_idx": 0,
        "seqlen": 5,
        "prompt_len": 2,
        "head_version": 4,
        "tail_version": 4,
        "reward": 1.0,
        "prompt": "3 1",
        "completion": "7 7 7",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_stale": "keep"}, "on_stale 'keep' is unknown"),
        ({"queue_size": 0}, "rollout.queue_size must be at least 1, got 0"),
        ({"max_errors_in_a_row": -1}, "must both be at least 1"),
        ({"max_errors_in_a_row": 0}, "must both be at least 1"),
        ({"max_rejections_in_a_row": 0}, "must both be at least 1"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(UsageError, match=message), dispatching(**options):
        pass
