"""Windows of the timeline of runs with a trace of the trainer but without sessions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.viewer.stage import client, run_id, write_run


def trace(path, spans: list[tuple[float, float]]) -> None:
    """Write the phases as the tracer does, each when it ends."""
    path = path / "perf_tracer" / "trainer" / "traces-r0.jsonl"
    path.parent.mkdir(parents=True)
    events = [
        {"ph": "X", "name": "train_step", "ts": begin * 1e6, "dur": (end - begin) * 1e6, "args": {"global_step": step}}
        for step, (begin, end) in enumerate(spans)
    ]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def windows(session, name: str = "run") -> list[dict[str, Any]]:
    """The last window and all earlier ones."""
    url, answers, until = f"/api/runs/{run_id(session, name)}/timeline", [], None
    while not answers or until is not None:
        answers.append(session.get(url, params={} if until is None else {"until": until}).raise_for_status().json())
        until = answers[-1]["earlier"]
        assert len(answers) < 50
    return answers


def steps_of(answer: dict[str, Any]) -> list[int]:
    return [phase["step"] for phase in answer["phases"]]


def test_earlier_phases_are_reached_across_long_gaps(tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    trace(run.path, [(1000.0 + 180 * step, 1010.0 + 180 * step) for step in range(4)])
    with client(tmp_path) as session:
        answers = windows(session)
    assert [steps_of(answer) for answer in answers] == [[3], [2], [1], [0]]
    assert [(answer["begin"], answer["end"]) for answer in answers] == [
        (1000.0 + 180 * step, 1010.0 + 180 * step) for step in (3, 2, 1, 0)
    ]


def test_a_window_with_too_many_phases_has_the_newest_and_the_others_are_earlier(tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    trace(run.path, [(2000 + step / 100, 2000 + (step + 1) / 100) for step in range(5000)])
    with client(tmp_path) as session:
        answers = windows(session)
    assert answers[0]["end"] == pytest.approx(2050)
    assert answers[0]["phases"][-1]["end"] == pytest.approx(2050)
    assert {step for answer in answers for step in steps_of(answer)} == set(range(5000))
    assert not any(answer["left_out"] for answer in answers)


def test_phases_that_are_left_out_beside_sessions_are_noted(tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    trace(run.path, [(2000 + step / 100, 2000 + (step + 1) / 100) for step in range(5000)])
    path = run.path / "session_tracer" / "rollout" / "sessions-r0.jsonl"
    path.parent.mkdir(parents=True)
    session_record = {"task_id": 0, "session_id": 0, "status": "accepted", "phases": {}}
    path.write_text(json.dumps({**session_record, "submit_ts": 2000.0, "finalized_ts": 2050.0}) + "\n")
    with client(tmp_path) as session:
        (answer,) = windows(session)
    assert (steps_of(answer), answer["left_out"]) == (list(range(3000, 5000)), True)
    assert answer["phases"][-1]["end"] == pytest.approx(2050)
