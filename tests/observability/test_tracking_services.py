"""Tracking services: each is written to and read back in its own format, locally, and none is imported unless used."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
import time
import types
from dataclasses import asdict

import pytest

from areno.errors import UsageError
from areno.observability.tracking_services import RunName, open_services
from tests.config.experiment.samples import rl

RUN = RunName("my exp", "trial/1", {"lr": 0.5})

# One process per test, because services read the environment when they are imported, and keep a global run.
PROGRAM = """
import json, sys, pathlib
from areno.observability.tracking_services import RunName, open_services
sections = json.loads(sys.argv[2])
for steps in json.loads(sys.argv[3]):  # each a run of its own, as after a restart
    (service,) = open_services(RunName("my exp", "trial/1", {"lr": 0.5}), pathlib.Path(sys.argv[1]), **sections)
    for step in steps:
        service.log(step, {"ppo_actor/task_reward/avg": step / 2, "bad@1": float("nan")})
    service.close()
heavy = [name for name in ("wandb", "swanlab", "trackio", "mlflow", "torch") if name in sys.modules]
print("LOADED", json.dumps(heavy))
"""


def needs(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


def send(folder, starts, **sections):
    environment = {**os.environ, "HOME": str(folder), "TRACKIO_DIR": str(folder / "trackio")}
    arguments = [str(folder), json.dumps(sections), json.dumps(starts)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("LOADED")[2].splitlines()[0])


def chunks_of(data):
    """Records of a log file in the LevelDB format: 32 KiB blocks of fragments, each with checksum, length and type."""
    place, record = 7, b""  # W&B's own header comes first
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or its last fragment
            yield record
            record = b""


def wandb_records(folder):
    """The runs and the steps in W&B's own file."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    records = [Record.FromString(chunk) for chunk in chunks_of(path.read_bytes())]
    history = [
        {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    return [record.run for record in records if record.HasField("run")], history


@needs("wandb")
def test_wandb_offline_keeps_every_step_under_the_documented_run_id(tmp_path):
    loaded = send(tmp_path, [[0, 1, 5]], wandb={"mode": "offline", "tags": ["a"], "notes": "n", "job_type": "rl"})
    assert "swanlab" not in loaded
    assert "trackio" not in loaded
    runs, history = wandb_records(tmp_path)
    run = runs[0]
    assert run.run_id == "my-exp_trial-1_train"
    assert (run.project, run.display_name, run.run_group) == ("my exp", "trial/1", "my exp_trial/1")
    assert (list(run.tags), run.notes, run.job_type) == (["a"], "n", "rl")
    assert {item.key: json.loads(item.value_json) for item in run.config.update}["lr"] == 0.5
    assert [(row["_step"], row["ppo_actor/task_reward/avg"]) for row in history] == [(0, 0.0), (1, 0.5), (5, 2.5)]


@needs("wandb")
def test_a_shared_wandb_run_has_the_step_as_a_metric(tmp_path, monkeypatch):
    """W&B refuses to tell the step of a shared run, and ignores steps. Such a run needs a server, so it is written offline."""
    program = """
import wandb
from wandb.sdk.wandb_run import Run
opened = wandb.init
def offline(**given):
    assert given["mode"] == "shared", given
    return opened(**{**given, "mode": "offline", "resume": None})
def refuse(run):
    raise wandb.Error("no step in shared mode")
def without_step(run, data, step=None):
    assert step is None
    return logged(run, data)
logged, wandb.init, Run.log, Run.step = Run.log, offline, without_step, property(refuse)
"""
    monkeypatch.setattr("tests.observability.test_tracking_services.PROGRAM", program + PROGRAM)
    send(tmp_path, [[0, 1, 5, 3]], wandb={"mode": "shared"})
    _, history = wandb_records(tmp_path)
    rows = [(row["step"], row["ppo_actor/task_reward/avg"]) for row in history]
    assert rows == [(0, 0.0), (1, 0.5), (5, 2.5), (3, 1.5)]


@needs("wandb")
def test_wandb_mode_true_means_online_and_fails_without_a_server(tmp_path):
    unreachable = {"wandb_base_url": "http://127.0.0.1:9", "wandb_api_key": "k" * 40}
    program = PROGRAM.replace('print("LOADED"', 'print("LOADED", service._run.settings.mode, "X"')
    arguments = [str(tmp_path), json.dumps({"wandb": {"mode": True, **unreachable}}), "[[]]"]
    environment = {**os.environ, "HOME": str(tmp_path), "WANDB_INIT_TIMEOUT": "2"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert "UsageError: wandb failed to start" in done.stderr
    assert "wandb.mode=disabled" in done.stderr


@needs("wandb")
def test_a_run_sends_its_steps_and_evaluations_on_the_axis_of_its_file_and_keeps_its_secrets(tmp_path):
    program = """
import logging, sys
from areno.api.trainers.step_reporter import StepReporter
from areno.config import TrainOptions
from areno.observability.health import HealthMonitor
from areno.training.frequency import StepInfo
from areno.training.reporter import StepOutcome
from areno.training.state import RunState
options = TrainOptions(run_dir=sys.argv[1], track=("wandb",), rollout_url=("http://user:hidden@host",))
report = StepReporter(options, logging.getLogger(), HealthMonitor())
report.record_evaluation(RunState(step=0), {"accuracy": 0.0})
for step in range(4):
    report.record_step(StepInfo(0, step, step, 4, 4), StepOutcome([], {"loss": 0.5 * step}, {}), RunState(step=step))
    report.record_evaluation(RunState(step=step + 1), {"accuracy": step + 1.0})
report.close()
"""
    environment = {**os.environ, "HOME": str(tmp_path), "WANDB_MODE": "offline"}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, check=True, timeout=120)
    expected = {}
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        expected.setdefault(row["step"], {}).update(row)
    runs, history = wandb_records(tmp_path)
    names = ("eval/accuracy", "train/loss")
    assert [{name: row.get(name) for name in names} for row in history] == [
        {name: row.get(name) for name in names} for row in expected.values()
    ]
    assert [row["_step"] for row in history] == [0, 1, 2, 3, 4]
    assert not any("hidden" in item.value_json for item in runs[0].config.update)


@needs("swanlab", "swanboard")
def test_swanlab_local_keeps_every_step(tmp_path):
    send(tmp_path, [[0, 1, 5, 3]], swanlab={"mode": "local"})
    (log,) = tmp_path.glob("swanlab/run-*/logs/*/*.log")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(row["index"], float(row["data"])) for row in rows] == [(0, 0.0), (1, 0.5), (5, 2.5), (6, 1.5)]


@needs("swanlab")
def test_swanlab_offline_keeps_a_run_to_send_later(tmp_path):
    send(tmp_path, [[0, 1]], swanlab={"mode": "offline", "logdir": str(tmp_path / "elsewhere")})
    (file,) = (tmp_path / "elsewhere").glob("run-*/run-*.swanlab")
    assert file.stat().st_size > 0


@needs("trackio")
def test_trackio_local_continues_its_history_after_a_restart(tmp_path):
    send(tmp_path, [[0, 1, 5], [3, 4]], trackio={"mode": "local", "project": "p"})
    with sqlite3.connect(tmp_path / "trackio" / "p.db") as base:
        rows = base.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert {row[0] for row in rows} == {"trial/1"}
    assert [row[1] for row in rows] == [0, 1, 5, 6, 7]
    assert [json.loads(row[2])["ppo_actor/task_reward/avg"] for row in rows] == [0.0, 0.5, 2.5, 1.5, 2.0]


def mlflow_rows(database, table):
    with sqlite3.connect(database) as base:
        base.row_factory = sqlite3.Row
        return [dict(row) for row in base.execute(f"select * from {table}")]


@needs("mlflow", "sqlalchemy")
def test_mlflow_continues_its_run_after_a_restart_with_unchanged_steps(tmp_path):
    database = tmp_path / "mlflow.db"
    send(tmp_path, [[0, 1, 5], [3, 4]], mlflow={"mode": "enabled", "tracking_uri": f"sqlite:///{database}"})
    assert "my exp" in [row["name"] for row in mlflow_rows(database, "experiments")]
    (run,) = mlflow_rows(database, "runs")
    assert (run["name"], run["status"]) == ("trial/1", "FINISHED")
    rows = [row for row in mlflow_rows(database, "metrics") if row["key"] == "ppo_actor/task_reward/avg"]
    assert sorted((row["step"], row["value"]) for row in rows) == [(0, 0.0), (1, 0.5), (3, 1.5), (4, 2.0), (5, 2.5)]
    assert {row["is_nan"] for row in mlflow_rows(database, "metrics") if row["key"] == "bad_1"} == {1}
    assert {row["key"]: row["value"] for row in mlflow_rows(database, "params")} == {"lr": "0.5"}


@needs("mlflow")
def test_an_unreachable_mlflow_server_is_reported_within_seconds(tmp_path):
    environment = {**os.environ, "HOME": str(tmp_path), "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    sections = json.dumps({"mlflow": {"mode": "enabled", "tracking_uri": "http://127.0.0.1:9"}})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), sections, "[[]]"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "UsageError: mlflow failed to start" in done.stderr
    assert "mlflow.mode=disabled" in done.stderr


def test_tensorboard_events_hold_the_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert send(tmp_path, [[0, 1, 5]], tensorboard={"path": str(tmp_path / "events")}) == []
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("ppo_actor/task_reward/avg")] == [(0, 0.0), (1, 0.5), (5, 2.5)]


def test_nothing_is_imported_for_disabled_services():
    code = (
        "import sys, pathlib; from areno.observability.tracking_services import *\n"
        "off = {'mode': 'disabled'}\n"
        "assert open_services(RunName('e', 't'), pathlib.Path('.'), wandb=off | {'name': None}, swanlab=off, "
        "tensorboard={'path': None}, trackio={'mode': False}, mlflow=off) == []\n"
        "print([name for name in ('wandb', 'swanlab', 'trackio', 'mlflow', 'torch', 'tensorboard') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("section", "package", "fields"),
    [
        ("wandb", "wandb", {"mode": "offline"}),
        ("swanlab", "swanlab", {"mode": "offline"}),
        ("trackio", "trackio", {"mode": "local"}),
        ("mlflow", "mlflow", {"mode": "enabled"}),
    ],
)
def test_a_missing_package_is_reported_with_the_command_that_installs_it(
    section, package, fields, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)  # importing it now raises ImportError
    with pytest.raises(
        UsageError, match=rf"{section}\.mode requires.*pip install '{package}'.*{section}\.mode=disabled"
    ):
        open_services(RUN, tmp_path, **{section: fields})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"wandb": {"mode": "ofline"}}, r"wandb\.mode='ofline'.*online, offline, shared, disabled"),
        ({"swanlab": {"mode": "online"}}, r"swanlab\.mode='online'.*cloud, local, offline, disabled"),
        ({"trackio": {"mode": "online"}}, r"trackio\.space_id is not set; set stats_logger\.trackio\.space_id"),
        ({"trackio": {"mode": "local", "space_id": "a/b"}}, r"use stats_logger\.trackio\.mode=online"),
        ({"mlflow": {"mode": "online"}}, r"mlflow\.mode='online'.*enabled, disabled"),
    ],
)
def test_an_invalid_mode_is_refused(sections, words, tmp_path):
    with pytest.raises(UsageError, match=words):
        open_services(RUN, tmp_path, **sections)


# -- sections of an experiment ---------------------------------------------------------------------------------------


def section(kind, /, **fields):
    """A section of ``stats_logger`` as an experiment passes it on."""
    loggers = rl(**{f"stats_logger__{kind}__{key}": value for key, value in fields.items()}).stats_logger
    return {kind: asdict(getattr(loggers, kind))}


@needs("wandb")
def test_wandb_fields_reach_the_run(tmp_path):
    fields = {
        **{
            "mode": "offline",
            "project": "p",
            "name": "n",
            "job_type": "j",
            "group": "g",
            "notes": "text",
            "entity": "me",
        },
        **{"tags": ["a", "b"], "config": {"shown": 3}, "id_suffix": "eval"},
    }
    send(tmp_path, [[0]], **section("wandb", **fields))
    run = wandb_records(tmp_path)[0][0]
    assert (run.project, run.display_name, run.run_group, run.entity) == ("p", "n", "g", "me")
    assert (list(run.tags), run.notes, run.job_type, run.run_id) == (["a", "b"], "text", "j", "my-exp_trial-1_eval")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["shown"] == 3
    assert "lr" not in config
    assert open_services(RUN, tmp_path, **section("wandb")) == []


class StandIn(types.ModuleType):
    """Stands in for a package whose cloud is out of reach, and keeps the arguments of its calls."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = {}

    def login(self, **options):
        self.calls["login"] = options

    def init(self, *names, **options):
        self.calls["init"] = {**options, **({"project": names[0]} if names else {})}
        return types.SimpleNamespace(finish=lambda: None, log=lambda *_, **__: None)


def test_swanlab_gets_the_settings_of_its_section(tmp_path, monkeypatch):
    package = StandIn("swanlab")
    monkeypatch.setitem(sys.modules, "swanlab", package)
    fields = {"project": "p", "name": "n", "config": {"shown": 3}, "logdir": str(tmp_path / "x"), "api_key": "key"}
    open_services(RUN, tmp_path, **section("swanlab", mode="cloud", **fields))
    arguments = package.calls["init"]
    assert package.calls["login"] == {"api_key": "key"}
    assert (arguments["project"], arguments["name"], arguments["config"], arguments["log_dir"], arguments["mode"]) == (
        *("p", "n", {"shown": 3}, str(tmp_path / "x")),
        "online",
    )
    assert open_services(RUN, tmp_path, **section("swanlab")) == []


def test_trackio_gets_the_settings_of_its_section(tmp_path, monkeypatch):
    package = StandIn("trackio")
    monkeypatch.setitem(sys.modules, "trackio", package)
    open_services(RUN, tmp_path, **section("trackio", mode="online", project="p", name="n", space_id="a/b"))
    arguments = package.calls["init"]
    assert (arguments["project"], arguments["name"], arguments["space_id"]) == ("p", "n", "a/b")
    assert open_services(RUN, tmp_path, **section("trackio")) == []


class MLflowStandIn(types.ModuleType):
    """Stands in for mlflow: keeps the calls of its client, and has one experiment and no runs."""

    def __init__(self):
        super().__init__("mlflow")
        self.calls = []
        self.entities = types.SimpleNamespace(Metric=lambda *values: values, Param=lambda *values: values)

    def get_tracking_uri(self):
        return "sqlite:///mlflow.db"

    def MlflowClient(self, tracking_uri):  # noqa: N802
        self.calls.append(("client", (tracking_uri,), {}))
        return MLflowStandInClient(self.calls)


class MLflowStandInClient:
    """The client of :class:`MLflowStandIn`."""

    def __init__(self, calls):
        self.calls = calls

    def __getattr__(self, name):
        answers = {
            "get_experiment_by_name": types.SimpleNamespace(experiment_id="7"),
            "search_runs": [],
            "create_run": types.SimpleNamespace(info=types.SimpleNamespace(run_id="r")),
        }

        def call(*values, **named):
            self.calls.append((name, values, named))
            return answers.get(name)

        return call


def test_mlflow_gets_the_settings_of_its_section(tmp_path, monkeypatch):
    package = MLflowStandIn()
    monkeypatch.setitem(sys.modules, "mlflow", package)
    fields = {"tracking_uri": "http://user:secret@host", "experiment": "x", "name": "n"}
    many = RunName("my exp", "trial/1", {f"a{i}": {"b": i, "c": None} for i in range(150)})
    (service,) = open_services(many, tmp_path, **section("mlflow", mode="enabled", **fields))
    service.log(3, {"eval/pass@1": 0.5})
    service.close()
    calls = {}
    for name, values, named in package.calls:
        calls.setdefault(name, []).append((values, named))
    assert calls["client"] == [(("http://user:secret@host",), {})]
    assert calls["get_experiment_by_name"] == [(("x",), {})]
    assert calls["create_run"] == [(("7",), {"run_name": "n", "tags": {"areno.run_id": "my-exp_trial-1"}})]
    batches = [named for _, named in calls["log_batch"]]
    assert [len(batch.get("params", ())) for batch in batches] == [100, 50, 0]
    assert batches[0]["params"][3] == ("a3.b", "3")
    ((name, value, milliseconds, step),) = batches[2]["metrics"]
    assert (name, value, step) == ("eval/pass_1", 0.5, 3)
    assert abs(milliseconds / 1000 - time.time()) < 60
    assert calls["set_terminated"] == [(("r",), {})]
    assert open_services(RUN, tmp_path, **section("mlflow")) == []
