"""Runs whose files are damaged, hostile, unreadable or missing: they hide no other run, and the rest is shown."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import tracemalloc

import pytest

from areno.storage.run_lock import run_lock
from areno.viewer.app import _overview
from areno.viewer.catalog import OpenedRun
from tests.viewer.stage import CONFIG, client, run_id, serving, write_run
from tests.viewer.test_live import listening

DEEP = "[" * 200_000
HUGE = 10**400
PARTS = ("", "/metrics?name=reward", "/samples", "/samples?text=x", "/evaluations", "/timeline", "/log")
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def append(path, *lines):
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))


CONFIGS = {
    "date": "day: 2026-13-45\n",
    "bool": "flag: !!bool maybe\n",
    "int": "number: !!int ''\n",
    "timestamp": "time: !!timestamp soon\n",
    "contains itself": "self: &a [*a]\n",
    "deep": f"deep: {DEEP}\n",
    "nested": f"algo: grpo\nmany: {'[' * 300}{']' * 300}\n",
    "mapping": "ckpt: {a: 1}\nalgo: [1]\n",
    "number": "ckpt: 5\n",
    "large number": f"algo: 0x{'f' * 5000}\n",
    "aliases": BOMB,
}


@pytest.mark.parametrize("config", CONFIGS)
def test_a_configuration_that_cannot_be_read_hides_no_run(tmp_path, config):
    write_run(tmp_path / "bad", steps=1, config=CONFIGS[config])
    write_run(tmp_path / "good", steps=1)
    with client(tmp_path) as session:
        rows = {row["name"]: row for row in session.get("/api/runs").raise_for_status().json()["runs"]}
    assert rows.keys() == {"bad", "good"}
    assert rows["bad"]["steps"] == 1
    assert all(value is None or isinstance(value, str) for value in (rows["bad"]["algo"], rows["bad"]["model"]))
    assert rows["good"]["algo"] == "grpo"


def test_setting_names_that_are_dates_become_text(tmp_path):
    write_run(tmp_path / "run", steps=1, config=CONFIG + "2026-01-01: {2026-01-02: x}\n")
    with client(tmp_path) as session:
        config = session.get(f"/api/runs/{run_id(session, 'run')}").raise_for_status().json()["config"]
    assert config["2026-01-01"] == {"2026-01-02": "x"}


def test_a_configuration_of_unexpected_types_does_not_prevent_a_comparison(tmp_path):
    write_run(tmp_path / "one", steps=1, config="experiment_name: e\nactor: text\n")
    write_run(tmp_path / "two", steps=1)
    with client(tmp_path) as session:
        ids = {side: run_id(session, name) for side, name in (("left", "one"), ("right", "two"))}
        assert session.get("/api/diff", params=ids).status_code == 200


def test_hostile_lines_are_left_out_and_the_others_are_read(tmp_path):
    run = write_run(tmp_path / "run", steps=3)
    deep = f'{{"step": 1, "x": {DEEP}'
    append(run.metrics_path, f'{{"step": {HUGE}, "train/loss": 1}}', deep)
    append(run.metrics_path, '{"step": 3, "time": "noon", "train/loss": 5.0}')
    append(run.metrics_path, f'{{"step": 4, "time": null, "train/loss": {HUGE}}}')
    append(run.samples_path, deep, '{"step": -1, "prompt_index": 0}', '{"step": 3, "picked": null}')
    append(run.samples_path, '{"step": 3, "picked": [[1]], "messages": 5}', f'{{"step": 3, "response_len": {HUGE}}}')
    nested = json.dumps("needle")
    for _ in range(400):
        nested = f"[{nested}]"
    append(run.samples_path, f'{{"step": 3, "prompt_index": 7, "completion": null, "messages": {nested}}}')
    append(run.samples_path, '{"step": 3, "prompt_index": 8, "completion": "x", "messages": 5, "reward_parts": 3}')
    append(run.eval_samples_path, '{"step": [1], "prompt_index": 0}', '{"step": 3, "prompt_index": []}', deep)
    append(run.warnings_path, deep)
    run.summary_path.write_text(DEEP)
    with client(tmp_path) as session:
        path = f"/api/runs/{run_id(session, 'run')}"
        for part in PARTS:
            assert session.get(path + part).status_code == 200, part
        loss = session.get(f"{path}/metrics", params={"name": "train/loss"}).json()["series"]["train/loss"]
        assert (loss["steps"], loss["values"][-2:]) == ([0, 1, 2, 3, 4], [5.0, None])
        newest = session.get(f"{path}/samples", params={"limit": 2}).json()["samples"]
        assert [(sample["prompt"], sample["excerpt"]) for sample in newest] == [(8, "x"), (7, "")]
        searched = session.get(f"{path}/samples", params={"text": "needle"}).json()["samples"]
        assert [sample["prompt"] for sample in searched] == [7]


def test_an_index_with_wrong_positions_does_not_break_the_list(tmp_path):
    run = write_run(tmp_path / "run", steps=2, prompts=1)
    index = run.samples_path.with_suffix(".index")
    content = bytearray(index.read_bytes())
    content[:8] = b"\xff" * 8  # the position of the first sample
    index.write_bytes(content)
    with client(tmp_path) as session:
        path = f"/api/runs/{run_id(session, 'run')}/samples"
        page = session.get(path, params={"order": "oldest"}).json()
        assert [sample["excerpt"] for sample in page["samples"]][:2] == [None, "It is 0.\nStraße 1"]
        assert session.get(f"{path}/0").status_code == 404


def test_damaged_traces_are_left_out(tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    sessions = run.path / "session_tracer" / "rollout" / "sessions-r0.jsonl"
    events = run.path / "perf_tracer" / "trainer" / "traces-r0.jsonl"
    for path in (sessions, events):
        path.parent.mkdir(parents=True)
    good = {"task_id": 3, "session_id": 0, "submit_ts": 100.0, "finalized_ts": 101.0, "phases": {}}
    phases = [{"generate": [{"start_ts": 1.0}]}, {"a": 1}, [1]]
    bad = [{"submit_ts": "x"}, {"finalized_ts": "noon"}, *({"phases": each} for each in phases)]
    append(sessions, *(json.dumps({**good, **change}) for change in bad), json.dumps(good), DEEP)
    append(events, '{"ph": "X", "name": "update_weights"}', '{"ph": "X", "ts": "x"}', '{"ph": ["X"], "ts": 1}')
    append(events, '{"ph": "X", "name": "update_weights", "ts": 100500000.0, "dur": 1.0, "args": {"global_step": "x"}}')
    append(events, '{"ph": "X", "name": "train_step", "ts": 100600000.0, "dur": 1.0, "args": [1]}')
    with client(tmp_path) as session:
        answer = session.get(f"/api/runs/{run_id(session, 'run')}/timeline").raise_for_status().json()
    assert [one["task"] for one in answer["sessions"]] == [3, 3], "one of the damaged ones only lacks its end"
    assert [phase["name"] for phase in answer["phases"]] == ["update_weights", "train_step"]


def test_an_evaluation_is_not_a_new_weight_version(tmp_path):
    run = write_run(tmp_path / "run", steps=0)
    for step in range(3):
        run.append_metrics(step, {"train/loss": 1.0})
    run.append_metrics(3, {"eval/rewards_mean": 1.0})
    path = run.path / "session_tracer" / "rollout" / "sessions-r0.jsonl"
    path.parent.mkdir(parents=True)
    times = {"submit_ts": 1.0, "finalized_ts": 4e9}  # spans all of them
    append(path, json.dumps({"task_id": 0, "session_id": 0, **times, "phases": {}}))
    with client(tmp_path) as session:
        answer = session.get(f"/api/runs/{run_id(session, 'run')}/timeline").json()
    assert [one["version"] for one in answer["versions"]] == [1, 2, 3]


# -- files that are not regular ----------------------------------------------------------------------------------------


def test_a_status_outside_of_the_folder_is_not_read(tmp_path):
    (tmp_path / "secret.json").write_text('{"state": "TOP", "error": "SECRET"}')
    run = write_run(tmp_path / "runs" / "run", steps=1)
    run.status_path.unlink()
    os.symlink(tmp_path / "secret.json", run.status_path)
    with client(tmp_path / "runs") as session:
        answer = session.get("/api/runs")
    assert "SECRET" not in answer.text
    assert "status.json" in answer.json()["runs"][0]["problem"]


@pytest.mark.parametrize("name", ["status.json", ".lock", "environment.json"])
def test_a_pipe_blocks_neither_the_list_nor_its_events(tmp_path, name):
    run = write_run(tmp_path / "piped", steps=1)
    if name == ".lock":
        run.status_path.unlink()  # then the lock alone determines the state
    (run.path / name).unlink(missing_ok=True)
    os.mkfifo(run.path / name)
    other = write_run(tmp_path / "other", steps=1)
    with serving(tmp_path) as url, listening(url, []) as next_event:
        other.append_warning(1, "new")
        assert next_event()["changed"] == ["row"]
    with client(tmp_path) as session:
        rows = {row["name"]: row for row in session.get("/api/runs").json()["runs"]}
        answer = session.get(f"/api/runs/{rows['piped']['id']}")
    assert ("problem" in rows["piped"], "problem" in rows["other"]) == (name == "status.json", False)
    assert (answer.status_code, name in answer.text) == ((200, False) if name == ".lock" else (403, True))


def test_a_file_that_is_read_as_a_whole_has_a_size_limit(tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    with open(run.summary_path, "wb") as file:
        file.truncate(2**30)
    with client(tmp_path) as session:
        (row,) = session.get("/api/runs").json()["runs"]
        answer = session.get(f"/api/runs/{row['id']}")
    assert (answer.status_code, "summary.json" in answer.text) == (403, True)


def test_a_huge_line_is_left_out_in_little_memory_and_the_others_are_read(tmp_path):
    huge = 2**27
    run = write_run(tmp_path / "run", steps=2)
    samples = len(run.samples_path.read_bytes().splitlines())
    run.samples_path.with_suffix(".index").unlink()
    for path in (run.metrics_path, run.samples_path, run.eval_samples_path, run.warnings_path):
        with open(path, "ab") as file:
            file.truncate(file.tell() + huge)  # a hole reads as zeros
            file.seek(0, 2)
            file.write(b"\n")
    run.append_metrics(2, {"rollout/rewards_mean": 0.5})
    with open(run.samples_path, "a") as file:
        file.write('{"step": 2, "prompt_index": 0, "completion": "after"}\n')
    run.append_warning(2, "after")
    with client(tmp_path) as session:
        tracemalloc.start()
        path = f"/api/runs/{run_id(session, 'run')}"
        overview = session.get(path).raise_for_status().json()
        metrics = session.get(f"{path}/metrics", params={"name": "reward"}).raise_for_status().json()
        page = session.get(f"{path}/samples", params={"limit": 1}).raise_for_status().json()
        evaluations = session.get(f"{path}/evaluations").raise_for_status().json()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 0.8 * huge
    assert overview["left_out"] == {"metrics.jsonl": huge + 1, "samples.jsonl": huge + 1}
    assert overview["warnings"][-1]["text"] == "after"
    assert (metrics["left_out"], metrics["series"]["reward"]["steps"]) == (huge + 1, [0, 1, 2])
    assert (page["left_out"], page["recorded"], page["samples"][0]["excerpt"]) == (huge + 1, samples + 1, "after")
    assert evaluations["steps"] == [0, 2]


def test_a_huge_sample_in_the_index_is_listed_but_not_read(tmp_path):
    run = write_run(tmp_path / "run", steps=1, prompts=1)
    run.append_samples([{"step": 1, "prompt_index": 0, "completion": "x" * 2**24}])
    with client(tmp_path) as session:
        path = f"/api/runs/{run_id(session, 'run')}/samples"
        newest, other = session.get(path, params={"limit": 2}).json()["samples"]
        assert (newest["step"], newest["excerpt"], other["step"]) == (1, None, 0)
        answer = session.get(f"{path}/{newest['index']}")
        assert (answer.status_code, "bytes" in answer.json()["error"]["message"]) == (403, True)


def test_a_page_of_samples_stays_small_whatever_its_reward_parts(tmp_path):
    run = write_run(tmp_path / "run", steps=0)
    parts = {f"part{number}": 0.5 for number in range(1000)}
    run.append_samples([{"step": 0, "reward_parts": {"text": "x" * 10_000, "deep": [[]], **parts}}])
    with client(tmp_path) as session:
        (sample,) = session.get(f"/api/runs/{run_id(session, 'run')}/samples").json()["samples"]
    assert sample["reward_parts"] == dict(list(parts.items())[:20])


def test_links_to_folders_are_not_searched(tmp_path):
    write_run(tmp_path / "elsewhere" / "run", steps=1)
    write_run(tmp_path / "runs" / "run", steps=1)
    os.symlink(tmp_path / "elsewhere", tmp_path / "runs" / "linked")
    os.symlink(tmp_path / "runs", tmp_path / "runs" / "circle")
    with client(tmp_path / "runs") as session:
        assert [row["path"] for row in session.get("/api/runs").json()["runs"]] == ["run"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_files_without_read_permission_hide_no_run(tmp_path):
    write_run(tmp_path / "good", steps=1)
    (tmp_path / "private").mkdir(mode=0)
    run = write_run(tmp_path / "unreadable", steps=1)
    run.warnings_path.chmod(0)
    try:
        with client(tmp_path) as session:
            rows = {row["name"]: row for row in session.get("/api/runs").raise_for_status().json()["runs"]}
            assert rows.keys() == {"good", "unreadable"}
            assert "warnings.jsonl" in rows["unreadable"]["problem"]
            answer = session.get(f"/api/runs/{rows['unreadable']['id']}")
            assert (answer.status_code, "warnings.jsonl" in answer.json()["error"]["message"]) == (403, True)
    finally:
        (tmp_path / "private").chmod(0o700)


def test_checking_the_lock_does_not_prevent_a_run_from_resuming(tmp_path):
    with run_lock(tmp_path, "wait"):
        pass
    looking = os.open(tmp_path / ".lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.03, os.close, [looking]).start()
    with run_lock(tmp_path, "wait"):
        assert (tmp_path / ".lock").read_text().startswith("process ")


# -- files that do not exist yet ---------------------------------------------------------------------------------------


def test_a_run_that_has_just_started_reports_the_number_of_its_metrics(tmp_path):
    run = write_run(tmp_path / "run", steps=0)
    run.metrics_path.unlink()
    with client(tmp_path) as session:
        path = f"/api/runs/{run_id(session, 'run')}/metrics"
        before = session.get(path).raise_for_status().json()
        run.append_metrics(0, {"train/loss": 1.0, "rollout/rewards_mean": 0.5})
        after = session.get(path).json()
    assert (before["metrics"], before["series"]) == (0, {})
    assert after["metrics"] == 2


def test_an_overview_survives_a_resume_that_replaces_the_metrics_while_they_are_read(tmp_path):
    run = OpenedRun("one", write_run(tmp_path / "run", steps=3).path, tmp_path)
    metrics = run.data().metrics

    class Replaced(dict):
        """Series that another thread replaces as soon as their names are read."""

        def __iter__(self):
            metrics._restart()
            return super().__iter__()

    metrics.series = Replaced(metrics.series)
    last = {"rollout/rewards_mean": 0.25 + 2 / 64, "eval/rewards_mean": 3 / 100}
    assert _overview(run)["metrics"].items() >= last.items()
