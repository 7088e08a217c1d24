"""Files and functions that a configuration names are checked before a model is loaded, and all errors are reported together."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from areno.cli.main import main as cli
from areno.config.experiment.saving import config_text
from areno.config.tracking import has_wandb_login
from areno.errors import DataError, UsageError
from areno.experiments.checks import check_inputs
from areno.experiments.run_experiment import run_experiment, trainer_class
from areno.experiments.trainers import experiment
from tests.config.experiment.samples import rl
from tests.engine.test_scalar_head import Hub
from tests.experiments.trainer_stage import CLASSES, settings_of_kind


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(experiment, "make_engine", load)


def test_all_errors_are_reported_together(tmp_path, no_model):
    (tmp_path / "mine.py").write_text("threshold = 3\ndef broken(:\n")
    (tmp_path / "filters.py").write_text("threshold = 3\n")
    config = rl(
        actor__path=str(tmp_path / "none"),
        train_dataset__path=str(tmp_path / "rows.jsonl"),
        reward__fn=f"{tmp_path / 'mine.py'}:reward",
        workflow__dynamic_filter_fn=f"{tmp_path / 'filters.py'}:threshold",
        cluster__fileroot=str(tmp_path),
    )
    with pytest.raises(UsageError) as caught:
        run_experiment(config)
    for part in (
        "actor.path folder does not exist",
        "train_dataset.path does not exist",
        "reward.fn",
        "mine.py line 2 is not valid Python",
        "workflow.dynamic_filter_fn",
        "is a int; pass a function",
    ):
        assert part in str(caught.value), part


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward__fn": "no_such_module.reward"}, "reward.fn: importing no_such_module raised ModuleNotFoundError"),
        ({"reward__fn": ""}, "reward.fn is missing; set reward.fn to a reward function"),
        (
            {"workflow__path": "json.JSONDecoder", "reward__weights": {"a": 1}},
            "reward.weights has no effect with a custom workflow",
        ),
        (
            {"workflow__path": "json.NoSuchWorkflow", "reward__fn": ""},
            "workflow.path 'json.NoSuchWorkflow': json defines no",
        ),
        (
            {"rollout__agent__agent_cls_path": "gone.py:Agent"},
            "rollout.agent.agent_cls_path file does not exist: gone.py",
        ),
        (
            {"train_dataset__dataset_kwargs": {"loader": "gone.py:load"}},
            "train_dataset.dataset_kwargs.loader file does not",
        ),
    ],
)
def test_functions_are_looked_up_first(tmp_path, changes, message):
    with pytest.raises(UsageError) as caught:
        check_inputs(rl(cluster__fileroot=str(tmp_path), **changes))
    assert message in str(caught.value)


NEEDED = {"rl": "no messages, prompt or question", "sft": "must contain `prompt`"}
NEEDED |= dict.fromkeys(("rw", "dpo"), "must contain `chosen`")


@pytest.mark.parametrize("kind", CLASSES)
def test_a_first_row_without_the_required_columns_is_refused_before_a_model_is_loaded(
    tmp_path, tiny_checkpoint, no_model, kind
):
    rows = tmp_path / "mine.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(8)))
    with pytest.raises(DataError) as caught:
        run_experiment(settings_of_kind(kind, tiny_checkpoint, tmp_path, {"train_dataset.path": str(rows)}))
    assert NEEDED[kind] in str(caught.value)
    assert "train_dataset" in str(caught.value)


def test_rows_of_a_custom_workflow_may_have_any_keys(tmp_path, tiny_checkpoint, no_model):
    rows = tmp_path / "mine.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(8)))
    config = settings_of_kind("rl", tiny_checkpoint, tmp_path, {"train_dataset.path": str(rows)})
    with pytest.raises(AssertionError, match="a model is loaded"):
        trainer_class(config)(config)  # the workflow is passed to train()


def test_a_missing_login_is_detected_without_the_service(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not has_wandb_login("")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    assert has_wandb_login("")
    assert not has_wandb_login("https://wandb.example.org")
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert has_wandb_login("https://wandb.example.org")


def test_a_missing_tracking_package_is_reported_before_a_model_is_loaded(
    tmp_path, tiny_checkpoint, no_model, monkeypatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    changes = {"stats_logger.wandb.mode": "online"}
    with pytest.raises(UsageError, match=r"wandb\.mode=online needs the package wandb"):
        run_experiment(settings_of_kind("sft", tiny_checkpoint, tmp_path, changes))


def test_a_dry_run_shows_what_would_be_done_and_writes_nothing(tmp_path, tiny_checkpoint, capsys):
    config = settings_of_kind("sft", tiny_checkpoint, tmp_path, {"total_train_epochs": 3, "total_train_steps": None})
    (tmp_path / "file.yaml").write_text(config_text(config), encoding="utf-8")
    assert cli(["run", str(tmp_path / "file.yaml"), "--dry-run", "launcher.inference_server_cpus_per_gpu=2"]) == 0
    output = capsys.readouterr().out
    shown, _, rest = output.partition("train_dataset: 12 rows")
    assert yaml.safe_load(shown[: shown.index("settings that are accepted")])["total_train_epochs"] == 3
    assert "areno's schedulers need no launcher" in shown
    assert "steps: 9 (3 per epoch), or fewer" in rest
    assert rest.endswith("dry run: nothing was started, and nothing was written\n")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("kind", "row"), [("dpo", '{"question": "x"}'), ("rl", '{"text": "x"}')])
def test_a_dry_run_checks_rows(tmp_path, tiny_checkpoint, capsys, kind, row):
    config = settings_of_kind(kind, tiny_checkpoint, tmp_path, {})
    (tmp_path / "file.yaml").write_text(config_text(config), encoding="utf-8")
    (tmp_path / f"{kind}.jsonl").write_text(f"{row}\n", encoding="utf-8")
    assert cli(["run", str(tmp_path / "file.yaml"), "--dry-run"]) == 2
    assert "train_dataset" in capsys.readouterr().err


OTHER_FAMILY = """
import sys
from pathlib import Path
from areno.errors import UsageError
from tests.experiments.trainer_stage import settings_of_kind, trainer_of
try:
    trainer_of(settings_of_kind("sft", "some/model", Path(sys.argv[1]), {"actor.model_type": "qwen3"}))
except UsageError as error:
    print(error)
"""


def test_a_model_of_another_family_on_the_hub_is_refused_before_its_weights_are_downloaded(tmp_path):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    handler = type("Served", (Hub,), {"folder": tmp_path / "served", "requested": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        variables = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
        variables["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
        command = [sys.executable, "-c", OTHER_FAMILY, str(tmp_path)]
        environment, root = os.environ | variables, Path(__file__).parents[2]
        result = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
        server.shutdown()
    message = "actor.model_type is 'qwen3', but some/model is a llama model; correct or remove actor.model_type"
    assert message in result.stdout, result.stderr
    assert set(handler.requested) == {"config.json"}
