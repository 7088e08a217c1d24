"""New data of a run reaches a client within two seconds, as a server-sent event."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from queue import Queue
from typing import Any

import httpx
import pytest

from areno.storage.run_lock import run_lock
from areno.viewer.catalog import OpenedRun, RunCatalog
from areno.viewer.changes import INTERVAL_S, Changes
from tests.viewer.stage import run_id, serving, write_run

PROMISED_S = 2.0


@contextmanager
def listening(url: str, runs: list[str]) -> Iterator[Callable[[], dict[str, Any]]]:
    """Connect to the events and wait for the first one; yields a function that waits for the next one."""
    events: Queue[dict[str, Any]] = Queue()
    session = httpx.Client(base_url=url, timeout=30)
    begun = threading.Event()

    def read() -> None:
        try:
            with session.stream("GET", "/api/events", params={"run": runs}) as stream:
                assert stream.headers["content-type"].startswith("text/event-stream")
                assert stream.headers["x-accel-buffering"] == "no"
                for line in stream.iter_lines():
                    if line == "data: {}":
                        begun.set()
                    elif line.startswith("data: "):
                        events.put(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError:
            return

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert begun.wait(10)
    yield lambda: events.get(timeout=PROMISED_S)


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "runs" / "run", steps=3)


@pytest.fixture
def url(run):
    with serving(run.path.parent) as address:
        yield address


def append(run, part):
    match part:
        case "metrics":
            run.append_metrics(3, {"rollout/rewards_mean": 0.875})
        case "samples":
            run.append_samples([{"step": 3, "prompt_index": 0, "reward": 1.0, "prompt": "p", "completion": "c"}])
        case "evaluations":
            run.append_eval_samples([{"step": 3, "prompt_index": 0, "completion": "c"}])
        case "warnings":
            run.append_warning(3, "new")
        case "status":
            run.write_status({"state": "failed", "error": "gone"})
        case "log":
            with open(run.log_path, "a") as file:
                file.write("another line\n")
        case "timeline":
            path = run.path / "session_tracer" / "rollout" / "sessions-r0.jsonl"
            path.parent.mkdir(parents=True)
            path.write_text("{}\n")


@pytest.mark.parametrize("part", ["metrics", "samples", "evaluations", "warnings", "status", "log", "timeline"])
def test_an_event_names_the_part_of_a_run_that_is_new(run, url, part):
    with httpx.Client(base_url=url) as session:
        watched = run_id(session, "run")
    with listening(url, [watched]) as next_event:
        append(run, part)
        assert next_event() == {"run": watched, "changed": [part]}


def test_after_an_event_the_new_values_can_be_read(run, url):
    with httpx.Client(base_url=url) as session:
        path = f"/api/runs/{run_id(session, 'run')}"
        known = session.get(f"{path}/metrics", params={"name": "reward"}).json()["series"]["reward"]["next"]
        with listening(url, [path.rsplit("/", 1)[1]]) as next_event:
            begin = time.monotonic()
            append(run, "metrics")
            next_event()
            series = session.get(f"{path}/metrics", params={"name": "reward", "after": known}).json()["series"][
                "reward"
            ]
            assert (series["steps"], series["values"]) == ([3], [0.875])
            assert time.monotonic() - begin < PROMISED_S


def test_a_killed_process_changes_the_status(run, url):
    with httpx.Client(base_url=url) as session:
        watched = run_id(session, "run")
    run.write_status({"state": "running"})
    with ExitStack() as stack:
        stack.enter_context(run_lock(run.path, "wait"))
        next_event = stack.enter_context(listening(url, [watched]))
        stack.close()  # releases the lock; the status remains, as after a kill
        assert next_event() == {"run": watched, "changed": ["status"]}


def test_the_list_of_runs_follows_new_runs_and_their_steps(run, url):
    with listening(url, []) as next_event:
        append(run, "metrics")
        assert next_event()["changed"] == ["row"]
    with listening(url, []) as next_event, httpx.Client(base_url=url) as session:
        begin = time.monotonic()
        write_run(run.path.parent / "second", steps=1)
        while not any(row["path"] == "second" for row in session.get("/api/runs").json()["runs"]):
            assert time.monotonic() - begin < 2 * PROMISED_S
            time.sleep(0.1)


def test_a_deleted_run_disappears_and_its_followers_are_notified(run, url):
    with httpx.Client(base_url=url) as session:
        watched = run_id(session, "run")
        with listening(url, [watched]) as next_event:
            shutil.rmtree(run.path)
            changed: set[str] = set()
            while not {"metrics", "status", "timeline"} <= changed:  # files are deleted one by one
                changed.update(next_event()["changed"])
        assert session.get(f"/api/runs/{watched}").status_code == 404


def test_a_run_that_was_deleted_after_the_last_search_is_not_listed(run):
    write_run(run.path.parent / "other", steps=1)
    catalog = RunCatalog(run.path.parent)
    assert {row["path"] for row in catalog.rows()} == {"run", "other"}
    shutil.rmtree(run.path)
    assert run.path in catalog.paths().values()
    assert {row["path"] for row in catalog.rows()} == {"other"}


class CountedRun(OpenedRun):
    """Counts how often its files are checked."""

    looks = 0

    def logs(self):
        self.looks += 1
        return super().logs()


def test_a_run_is_checked_once_for_all_its_followers_and_not_without_any(tmp_path):
    files = write_run(tmp_path / "run", steps=1)
    run = CountedRun("one", files.path, tmp_path)

    async def follow() -> list[list[str]]:
        changes = Changes(RunCatalog(tmp_path), asyncio.Event())
        clients = [changes.events([run]) for _ in range(10)]
        await asyncio.gather(*map(anext, clients))  # the streams have started
        files.append_warning(1, "new")
        heard = [json.loads((await anext(client)).removeprefix("data: "))["changed"] for client in clients]
        for client in clients:
            await client.aclose()
        await asyncio.sleep(3 * INTERVAL_S)
        looks = run.looks
        await asyncio.sleep(3 * INTERVAL_S)
        assert run.looks == looks, "no client is left"
        return heard

    assert asyncio.run(follow()) == [["warnings"]] * 10
    assert run.looks < 10


def test_a_renamed_run_does_not_end_the_stream(run, url):
    with httpx.Client(base_url=url) as session:
        watched = run_id(session, "run")
    with listening(url, [watched]) as next_event:
        saved = run.path.with_name("hidden")
        run.path.rename(saved)
        time.sleep(0.8)
        saved.rename(run.path)
        append(run, "warnings")
        assert any("warnings" in next_event()["changed"] for _ in range(5))
