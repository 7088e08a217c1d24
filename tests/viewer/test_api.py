"""The endpoints of the viewer, compared with the contents of the files."""

from __future__ import annotations

import json
import math
import time

import pytest

from areno.observability.perf_tracer import PerfTracer
from areno.observability.session_tracer import SessionTracer
from areno.storage.run_lock import run_lock
from tests.viewer.stage import CONFIG, client, lines_of, run_id, write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "one")
    write_run(folder / "deep" / "two", config=CONFIG.replace("0.001", "0.01") + "only_here: null\n")
    return folder


@pytest.fixture(scope="module")
def session(runs):
    with client(runs) as opened:
        yield opened


@pytest.fixture(scope="module")
def one(session):
    return f"/api/runs/{run_id(session, 'one')}"


def test_the_list_has_a_row_per_run_with_values_from_its_files(session, runs):
    answer = session.get("/api/runs").json()
    rows = {row["path"]: row for row in answer["runs"]}
    assert answer["folder"] == str(runs)
    assert rows.keys() == {"one", "deep/two"}
    last = [record for record in lines_of(runs / "one" / "metrics.jsonl") if "train/loss" in record][-1]
    row = rows["one"]
    assert (row["name"], row["kind"], row["algo"], row["model"]) == ("one", "train", "grpo", "/models/tiny")
    assert (row["state"], row["started"], row["ended"]) == ("finished", 1_700_000_000.0, 1_700_000_100.0)
    assert (row["steps"], row["reward"], row["loss"]) == (
        last["step"] + 1,
        last["rollout/rewards_mean"],
        last["train/loss"],
    )
    assert row["warnings"] == 1


def test_an_experiment_is_listed_with_its_dataset_type_and_actor(tmp_path):
    config = "experiment_name: e\nactor: {path: m/actor}\ntrain_dataset: {type: sft}\n"
    run = write_run(tmp_path / "logs" / "me" / "e" / "t", config=config)
    run.append_metrics(20, {"rollout/reward/avg": 0.75})
    with client(tmp_path) as session:
        (row,) = session.get("/api/runs").json()["runs"]
    assert (row["kind"], row["algo"], row["model"], row["steps"], row["reward"]) == (
        "experiment",
        "sft",
        "m/actor",
        21,
        0.75,
    )


def test_a_run_without_its_lock_was_killed(tmp_path):
    run = write_run(tmp_path / "run", steps=2)
    run.write_status({"state": "running", "started": 1.0})
    with client(tmp_path) as session:
        with run_lock(run.path, "wait"):
            assert session.get("/api/runs").json()["runs"][0]["state"] == "running"
        assert session.get("/api/runs").json()["runs"][0]["state"] == "killed"


def test_the_overview_has_configuration_environment_warnings_and_last_values(session, one, runs):
    answer = session.get(one).json()
    records = lines_of(runs / "one" / "metrics.jsonl")
    assert answer["config"]["nested"] == {"depth": 2, "names": ["a", "b"]}
    assert answer["environment"]["packages"] == {"torch": "2.11"}
    assert [(item["step"], item["text"]) for item in answer["warnings"]] == [
        (3, "step 3: the reward is flat; try easier prompts")
    ]
    assert answer["metrics"] == {
        name: next(record[name] for record in reversed(records) if name in record)
        for name in ("rollout/rewards_mean", "train/loss", "train/staleness_mean", "time/rollout", "eval/rewards_mean")
    }
    assert answer["keys"]["reward"] == "rollout/rewards_mean"
    assert (answer["steps"], answer["samples"]) == (20, len(lines_of(runs / "one" / "samples.jsonl")))


def test_secrets_of_a_configuration_are_not_shown(tmp_path):
    write_run(tmp_path / "run", steps=1, config=CONFIG + "wandb_api_key: sk-hidden\ntracker: {api_key: sk-hidden}\n")
    with client(tmp_path) as session:
        answer = session.get(f"/api/runs/{run_id(session, 'run')}")
    assert answer.json()["config"]["seed"] == 0
    assert "sk-hidden" not in answer.text


def test_a_series_has_the_values_of_the_file_and_only_new_ones_after_a_cursor(session, one, runs):
    records = [record for record in lines_of(runs / "one" / "metrics.jsonl") if "train/loss" in record]
    answer = session.get(f"{one}/metrics", params={"name": ["reward", "train/loss", "unknown"]}).json()
    assert answer["series"].keys() == {"reward", "train/loss"}
    reward = answer["series"]["reward"]
    assert reward["metric"] == "rollout/rewards_mean"
    assert reward["steps"] == [record["step"] for record in records]
    assert reward["values"] == [record["rollout/rewards_mean"] for record in records]
    first = lines_of(runs / "one" / "metrics.jsonl")[0]["time"]
    assert reward["minutes"] == pytest.approx([(record["time"] - first) / 60 for record in records], abs=2e-3)
    loss = answer["series"]["train/loss"]
    assert loss["values"] == [None if record["step"] == 7 else record["train/loss"] for record in records]
    assert loss["not_finite"] == [7]
    known = [loss["next"], "0"]
    later = session.get(f"{one}/metrics", params={"name": ["train/loss", "reward"], "after": known}).json()["series"]
    assert (later["train/loss"]["start"], later["train/loss"]["values"]) == (20, [])
    assert (later["reward"]["start"], later["reward"]["steps"]) == (0, reward["steps"])


def test_a_long_series_keeps_its_extremes(tmp_path):
    run = write_run(tmp_path / "run", steps=0)
    values = [math.sin(step / 40) + (step == 4321) * 50 - (step == 1234) * 50 for step in range(6000)]
    lines = [json.dumps({"step": step, "time": 0.0, "x": value}) for step, value in enumerate(values)]
    run.metrics_path.write_text("\n".join(lines) + "\n")
    with client(tmp_path) as session:
        path = f"/api/runs/{run_id(session, 'run')}/metrics"
        series = session.get(path, params={"name": "x"}).json()["series"]["x"]
        few = session.get(path, params={"name": "x", "points": 10}).json()["series"]["x"]
    assert 500 < len(series["values"]) <= 1000
    assert series["steps"] == sorted(set(series["steps"]))
    assert series["values"] == [values[step] for step in series["steps"]]
    assert {0, 1234, 4321, 5999} <= set(series["steps"])
    assert {0, 1234, 4321, 5999} <= set(few["steps"])
    assert len(few["steps"]) <= 10


@pytest.mark.parametrize("same_values", [False, True])
def test_a_resume_that_drops_steps_is_detected(tmp_path, same_values):
    run = write_run(tmp_path / "run", steps=10)
    with client(tmp_path) as session:
        path = f"/api/runs/{run_id(session, 'run')}/metrics"
        before = session.get(path, params={"name": "reward"}).json()["series"]["reward"]
        run.truncate_after(4)
        values = [0.25 + step / 64 if same_values else 9.0 for step in range(5, 30)]  # more than before
        for step, value in enumerate(values, start=5):
            run.append_metrics(step, {"rollout/rewards_mean": value})
        after = session.get(path, params={"name": "reward", "after": before["next"]}).json()["series"]["reward"]
    assert (after["start"], after["values"]) == (0, [0.25 + step / 64 for step in range(5)] + values)


@pytest.mark.parametrize("resumed", [False, True])
def test_points_of_a_client_remain_valid_after_the_server_closes_the_run(tmp_path, resumed):
    run = write_run(tmp_path / "run", steps=10)
    for number in range(20):  # more than are kept open
        write_run(tmp_path / f"other{number}", steps=1)
    with client(tmp_path) as session:
        path = f"/api/runs/{run_id(session, 'run')}/metrics"
        known = session.get(path, params={"name": "reward"}).json()["series"]["reward"]["next"]
        for row in session.get("/api/runs").json()["runs"]:
            if row["path"] != "run":
                session.get(f"/api/runs/{row['id']}").raise_for_status()
        if resumed:
            run.truncate_after(4)
        for step in range(5 if resumed else 10, 12):
            run.append_metrics(step, {"rollout/rewards_mean": 9.0})
        series = session.get(path, params={"name": "reward", "after": known}).json()["series"]["reward"]
    assert (series["start"], series["steps"]) == ((0, list(range(12))) if resumed else (10, [10, 11]))


QUERIES = [
    ({}, lambda sample: True),
    ({"step_from": 5, "step_to": 7}, lambda sample: 5 <= sample["step"] <= 7),
    ({"reward_min": 2, "reward_max": 3.5}, lambda sample: 2 <= sample["reward"] <= 3.5),
    ({"flag": ["worst"]}, lambda sample: "worst" in sample["picked"]),
    ({"flag": ["best", "truncated"]}, lambda sample: "best" in sample["picked"] or sample["finish_reason"] == "length"),
    ({"text": "strasse 2"}, lambda sample: "Straße 2" in sample["completion"]),
    (
        {"text": "IS 17 PLUS", "flag": ["first"]},
        lambda sample: "17 plus" in sample["prompt"] and "first" in sample["picked"],
    ),
    ({"text": ".\nStraße 1"}, lambda sample: sample["sample_index"] == 1),
    ({"text": "reward_parts"}, lambda sample: False),
]


@pytest.mark.parametrize(("query", "passes"), QUERIES)
@pytest.mark.parametrize("limit", [7, 200])
def test_pages_have_exactly_the_samples_that_match(session, one, runs, query, passes, limit):
    samples = lines_of(runs / "one" / "samples.jsonl")
    expected = [index for index, sample in enumerate(samples) if passes(sample)]
    indices, offset = [], 0
    while offset is not None:
        page = session.get(
            f"{one}/samples", params={**query, "order": "oldest", "limit": limit, "offset": offset}
        ).json()
        assert len(page["samples"]) <= limit
        indices += [sample["index"] for sample in page["samples"]]
        offset = page["next"]
    assert indices == expected
    assert page["recorded"] == len(samples)
    for shown in page["samples"]:
        sample = samples[shown["index"]]
        assert (shown["step"], shown["prompt"], shown["reward"]) == (
            sample["step"],
            sample["prompt_index"],
            sample["reward"],
        )
        assert (shown["tokens"], shown["advantage"]) == (sample["response_len"], sample["advantage"])
        assert shown["reward_parts"] == {"format": 1.0}


@pytest.mark.parametrize(
    ("order", "key"),
    [
        ("newest", lambda index, sample: -index),
        ("best", lambda index, sample: (-sample["reward"], index)),
        ("worst", lambda index, sample: (sample["reward"], index)),
        ("longest", lambda index, sample: (-sample["response_len"], index)),
        ("shortest", lambda index, sample: (sample["response_len"], index)),
    ],
)
def test_samples_have_the_requested_order(session, one, runs, order, key):
    samples = lines_of(runs / "one" / "samples.jsonl")
    expected = sorted(range(len(samples)), key=lambda index: key(index, samples[index]))
    page = session.get(f"{one}/samples", params={"order": order, "limit": 200}).json()
    assert [sample["index"] for sample in page["samples"]] == expected[:200]


def test_pages_do_not_shift_while_samples_arrive(tmp_path):
    run = write_run(tmp_path / "run", steps=4, prompts=1)
    with client(tmp_path) as session:
        path = f"/api/runs/{run_id(session, 'run')}/samples"
        first = session.get(path, params={"limit": 6}).json()
        run.append_samples([{"step": 4, "prompt_index": 0, "reward": 1.0, "prompt": "p", "completion": "c"}])
        rest = session.get(path, params={"limit": 6, "offset": first["next"], "until": first["until"]}).json()
    assert [sample["index"] for sample in first["samples"] + rest["samples"]] == list(range(11, -1, -1))
    assert rest["recorded"] == 13


@pytest.mark.parametrize(
    ("query", "parameter"),
    [
        ({"flag": "tall"}, "flag"),
        ({"order": "random"}, "order"),
        ({"limit": 0}, "limit"),
        ({"step_to": "x"}, "step_to"),
    ],
)
def test_invalid_filters_are_named(session, one, query, parameter):
    answer = session.get(f"{one}/samples", params=query)
    assert answer.status_code == 400
    assert parameter in answer.json()["error"]["message"]


def test_a_sample_is_shown_in_full_with_the_others_of_its_prompt(session, one, runs):
    samples = lines_of(runs / "one" / "samples.jsonl")
    answer = session.get(f"{one}/samples/40").json()
    assert answer["record"] == samples[40]
    same = [i for i, sample in enumerate(samples) if all(sample[k] == samples[40][k] for k in ("step", "prompt_index"))]
    assert [other["index"] for other in answer["same_prompt"]] == same
    assert session.get(f"{one}/samples/{len(samples)}").status_code == 404


def test_differences_between_two_runs_are_listed(session):
    ids = {"left": run_id(session, "one"), "right": run_id(session, "deep/two")}
    answer = session.get("/api/diff", params=ids).json()
    settings = [(one["name"], one["values"], one["changes_results"]) for one in answer["settings"]]
    assert ("lr", [0.001, 0.01], True) in settings
    assert {name for name, _, _ in settings} == {"lr", "only_here"}
    assert answer["environment"] == []
    assert answer["divergence"]["different"] is None, "both have the same steps"
    (reward,) = [curve for curve in answer["curves"] if curve["key"] == "reward"]
    assert (reward["first"], reward["last"]) == ([0.25, 0.25], [0.25 + 19 / 64] * 2)
    assert "/tmp" not in json.dumps(answer["runs"])


def test_a_metric_is_explained(session):
    (answer,) = session.get("/api/explain", params={"name": "train/entropy"}).json()
    assert (answer["name"], answer["command"]) == ("train/entropy", "areno train")
    assert "nats" in answer["meaning"] + answer["unit"]
    assert {one["command"] for one in session.get("/api/explain", params={"name": "reward"}).json()} == {
        "areno train",
        "areno run",
    }
    assert session.get("/api/explain", params={"name": "nonsense"}).json() == []


def test_evaluations_before_and_after(session, one):
    answer = session.get(f"{one}/evaluations").json()
    assert (answer["steps"], answer["before"], answer["after"]) == ([0, 20], 0, 20)
    assert [(item["prompt"], item["before"]["completion"], item["after"]["reward"]) for item in answer["prompts"]] == [
        (f"Q{index}", "A0", 20 + index) for index in range(3)
    ]
    same = session.get(f"{one}/evaluations", params={"before": 20, "after": 20}).json()
    assert all(item["before"] == item["after"] for item in same["prompts"])


def test_the_log_is_read_from_its_end_backwards_and_forwards(session, one, runs):
    text = (runs / "one" / "log.txt").read_text().splitlines()
    tail = session.get(f"{one}/log").json()
    assert tail["files"] == ["log.txt"]
    assert tail["lines"] == text[-len(tail["lines"]) :]
    assert 500 < len(tail["lines"]) < 3000
    lines, start = tail["lines"], tail["start"]
    while start:
        part = session.get(f"{one}/log", params={"before": start}).json()
        assert part["end"] == start
        lines, start = part["lines"] + lines, part["start"]
    assert lines == text
    with open(runs / "one" / "log.txt", "a") as file:
        file.write("one more\x1b[31m\nincomplete")
    more = session.get(f"{one}/log", params={"after": tail["end"]}).json()
    assert more["lines"] == ["one more\\x1b[31m"]


def test_a_long_line_of_a_log_is_shortened_and_hides_no_other(tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    run.log_path.write_text(f"first\n{'x' * 1_000_000}\nlast\n")
    with client(tmp_path) as session:
        path = f"/api/runs/{run_id(session, 'run')}/log"
        part = session.get(path).json()
        assert part["lines"][-1] == "last"
        lines, start = part["lines"], part["start"]
        while start:
            part = session.get(path, params={"before": start}).json()
            assert (part["end"], part["start"] < start) == (start, True)
            lines, start = part["lines"] + lines, part["start"]
        forward, end = [], 0
        while end < part["size"]:
            part = session.get(path, params={"after": end}).json()
            forward, end = forward + part["lines"], part["end"]
    for all_lines in (lines, forward):
        assert (all_lines[0], all_lines[-1]) == ("first", "last")
        assert all("characters omitted" in line and len(line) <= 4040 for line in all_lines[1:-1])
        assert 10 < len(all_lines) < 25


def test_non_finite_numbers_and_unpaired_surrogates_are_transmitted(tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    with open(run.samples_path, "a") as file:
        file.write('{"step": 1, "prompt_index": 0, "reward": NaN, "prompt": "p", "completion": "half \\ud83d"}\n')
    with client(tmp_path) as session:
        path = f"/api/runs/{run_id(session, 'run')}/samples"
        answer = session.get(f"{path}/9")
        page = session.get(path, params={"text": "half"}).json()
    assert json.loads(answer.text)["record"] == {
        "step": 1, "prompt_index": 0, "reward": "NaN", "prompt": "p", "completion": "half \ud83d",
    }  # fmt: skip
    assert [sample["reward"] for sample in page["samples"]] == [None]


def test_a_folder_without_runs_and_a_run_without_files(tmp_path):
    with client(tmp_path) as session:
        assert session.get("/api/runs").json()["runs"] == []
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.yaml").write_text("algo: sft\n")
    with client(tmp_path) as session:
        path = f"/api/runs/{run_id(session, 'bare')}"
        assert session.get("/api/runs").json()["runs"][0] | {"id": 0} == {
            "id": 0, "name": "bare", "path": "bare", "warnings": 0, "kind": "train", "algo": "sft", "model": None, "steps": 0,
            "time": None, "reward": None, "loss": None, "started": None, "ended": None, "error": None, "signal": None,
            "state": "unknown",
        }  # fmt: skip
        for part in ("", "/metrics?name=reward", "/samples", "/evaluations", "/timeline", "/log"):
            assert session.get(path + part).status_code == 200, part


@pytest.mark.parametrize(
    "config",
    [
        "[",
        "- a list",
        "",
        "experiment_name: e\nactor: text\ntrain_dataset: 3\n",
        "algo: {a: 1}\nday: 2026-01-01\nmany: !!set {x, y}\n",
    ],
)
def test_a_damaged_run_does_not_hide_the_others(tmp_path, config):
    bad = write_run(tmp_path / "bad", steps=2, config=config)
    for path in (bad.metrics_path, bad.samples_path, bad.eval_samples_path, bad.warnings_path, bad.status_path):
        path.write_bytes(b'{"step": "x"}\nnull\n[1]\n"text"\n\xff\xfe{\n{"step": 1}\n')
    write_run(tmp_path / "good", steps=1)
    with client(tmp_path) as session:
        assert {row["name"] for row in session.get("/api/runs").json()["runs"]} == {"bad", "good"}
        path = f"/api/runs/{run_id(session, 'bad')}"
        for part in ("", "/metrics?name=reward", "/samples", "/samples?text=x", "/evaluations", "/timeline", "/log"):
            assert session.get(path + part).status_code == 200, part


@pytest.fixture
def traced(tmp_path):
    """A run whose real tracers recorded 3 steps, each with two sessions that begin before its update."""
    run = write_run(tmp_path / "run", steps=0)
    perf, sessions = PerfTracer(run.path), SessionTracer(run.path, flush_threshold=1)
    for step in range(3):
        for task in (2 * step, 2 * step + 1):
            with sessions.session_context(task), sessions.trace_session_phase("generate"):
                time.sleep(0.01)
            sessions.finalize(task, "accepted")
        with perf.step(step):
            with perf.trace_scope("train_step"):
                time.sleep(0.01)
            with perf.trace_scope("update_weights"):
                time.sleep(0.002)
        perf.save(step)
        time.sleep(0.02)
        run.append_metrics(step, {"train/loss": 1.0})
    return run


def test_the_timeline_has_sessions_with_the_version_they_began_with(traced, tmp_path):
    records = lines_of(traced.path / "session_tracer" / "rollout" / "sessions-r0.jsonl")
    events = [
        event for event in lines_of(traced.path / "perf_tracer" / "trainer" / "traces-r0.jsonl") if event["ph"] == "X"
    ]
    with client(tmp_path) as session:
        answer = session.get(f"/api/runs/{run_id(session, 'run')}/timeline").json()
    assert [(one["task"], one["version"], one["status"]) for one in answer["sessions"]] == [
        (task, task // 2, "accepted") for task in range(6)
    ]
    for one, record in zip(answer["sessions"], records, strict=True):
        assert (one["begin"], one["end"]) == (record["submit_ts"], record["finalized_ts"])
        (span,) = record["phases"]["generate"]
        assert one["phases"] == [{"name": "generate", "begin": span["start_ts"], "end": span["end_ts"]}]
    shown = [(phase["name"], phase["step"]) for phase in answer["phases"]]
    assert shown == [(event["name"], event["args"]["global_step"]) for event in events][: len(shown)]
    ends = [(event["ts"] + event["dur"]) / 1e6 for event in events if event["name"] == "update_weights"]
    assert [version["version"] for version in answer["versions"]] == [1, 2]
    assert [version["time"] for version in answer["versions"]] == pytest.approx(ends[:2], abs=1e-3)
    assert (answer["traced"], answer["earlier"]) == (True, None)


def test_without_a_trainer_trace_versions_have_the_times_of_the_metrics(traced, tmp_path):
    (traced.path / "perf_tracer" / "trainer" / "traces-r0.jsonl").unlink()
    with client(tmp_path) as session:
        answer = session.get(f"/api/runs/{run_id(session, 'run')}/timeline").json()
    times = [record["time"] for record in lines_of(traced.metrics_path) if "train/loss" in record]
    assert [(one["version"], one["time"]) for one in answer["versions"]] == list(enumerate(times[:2], start=1))
    assert (len(answer["sessions"]), answer["phases"]) == (6, [])


def test_earlier_windows_of_a_long_trace_continue_where_the_later_one_began(tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    path = run.path / "session_tracer" / "rollout" / "sessions-r0.jsonl"
    path.parent.mkdir(parents=True)
    lines = [
        {
            "task_id": n,
            "session_id": n,
            "submit_ts": 1000.0 + n,
            "finalized_ts": 1001.5 + n,
            "status": "accepted",
            "phases": {},
        }
        for n in range(30_000)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks, until = [], None
    with client(tmp_path) as session:
        url = f"/api/runs/{run_id(session, 'run')}/timeline"
        for _ in range(3):
            answer = session.get(url, params={} if until is None else {"until": until}).json()
            tasks = [one["task"] for one in answer["sessions"]] + tasks
            until = answer["earlier"]
        assert tasks == list(range(30_000 - len(tasks), 30_000))
        assert len(tasks) > 1000
        early = session.get(url, params={"until": 1011.0}).json()
    assert [one["task"] for one in early["sessions"]] == list(range(10))
    assert early["earlier"] is None
