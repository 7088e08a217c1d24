"""Published experiment files: the outcome of each setting, and each kind of file loads or is refused with a remedy."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from areno.config.experiment import DPOConfig, GRPOConfig, config_from, experiment_class, load_expr_config
from areno.config.experiment.notices import changes_nothing, notice
from areno.config.experiment.setting_declaration import paths_of, walk
from areno.errors import UsageError
from tests.config.experiment.samples import changed
from tests.config.experiment.shown_by import EFFECTS

FOLDER = Path(__file__).with_name("published")
SETTINGS = yaml.safe_load((FOLDER / "settings.yml").read_text(encoding="utf-8"))
GROUPS = [name for name in SETTINGS if name != "refused"]
OUTCOMES = ("takes effect", "is the default", "changes nothing")
BASE = {
    "experiment_name": "published",
    "trial_name": "trial0",
    "actor": {"path": "some/model", "backend": "fsdp:d4", "optimizer": {"lr": 1e-4}},
    "rollout": {"backend": "areno:d4"},
    "train_dataset": {"path": "rows.jsonl", "type": "rl", "batch_size": 8},
}
NEEDED = {
    "actor.target_modules": {"actor.use_lora": True},
    "allocation_mode": {"actor.backend": "", "rollout.backend": ""},
    "teacher": {"teacher.path": "some/teacher"},
}
# What the message about each file says to write; with these changes, the file loads.
REMEDIES = {
    "grpo": [],
    "ppo": [],
    "sft": [],
    "dpo": [],
    "rm": [],
    "lora": ["actor.target_modules=[q_proj, k_proj]"],
    "multi_turn": ["~max_turns", "workflow.kwargs.max_turns=3", "~export_style", "rollout.agent.export_style=concat"],
    "agent": ["~econfig"],
    "distillation": ["~teacher.backend", "~teacher.dtype"],
    "vision": ["~sglang.enable_multimodal"],
    "ray": [],
    "slurm": [],
    "megatron": ["~actor.megatron.fp8_config"],
    "cpu": [],
}


def experiment(values: dict[str, Any], cls: type = GRPOConfig) -> Any:
    tree = changed(BASE, values)
    return config_from({name: value for name, value in tree.items() if name != "rollout" or cls is GRPOConfig}, cls)


@functools.cache
def loaded(group: str) -> tuple[Any, dict[str, Any], list[str]]:
    """The experiment of a group, its values by path, and the paths that it lists as changing nothing."""
    settings = SETTINGS[group]
    values = dict(settings.get("besides", {}))
    for outcome in OUTCOMES:
        values |= settings.get(outcome, {})
    config = experiment(values, DPOConfig if group == "dpo" else GRPOConfig)
    by_path = {path: value for path, _, value in walk(config)}
    return config, by_path, [path for path, _ in changes_nothing(config)]


def rows(*outcomes: str) -> list[Any]:
    return [
        pytest.param(group, path, value, id=path)
        for group in GROUPS
        for outcome in outcomes
        for path, value in SETTINGS[group].get(outcome, {}).items()
    ]


def kept(by_path: dict[str, Any], path: str) -> Any:
    """The value at a path, which may be that of a key in a mapping."""
    section, _, name = path.rpartition(".")
    return by_path[path] if path in by_path else by_path[section][name]


@pytest.mark.parametrize(("group", "path", "value"), rows("takes effect"))
def test_a_published_value_takes_effect(group, path, value):
    config, by_path, idle = loaded(group)
    other = re.fullmatch(r"\$\{(.*)\}", str(value))
    assert kept(by_path, path) == (by_path[other[1]] if other else value)
    assert not any(path == one or path.startswith(f"{one}.") for one in idle)
    entry = paths_of(type(config)).get(path) or paths_of(type(config))[path.rpartition(".")[0]]
    assert entry.shape in ("section", "sections") or f"{entry.owner}.{entry.name}" in EFFECTS


@pytest.mark.parametrize(("group", "path", "value"), rows("is the default"))
def test_a_published_value_is_the_default(group, path, value):
    config, by_path, _ = loaded(group)
    entry = paths_of(type(config))[path]
    assert kept(by_path, path) == entry.default
    assert "${" in str(value) or value == entry.default


@pytest.mark.parametrize(("group", "path", "value"), rows("changes nothing"))
def test_a_published_value_changes_nothing_and_is_listed(group, path, value):
    _, _, idle = loaded(group)
    assert any(path == one or path.startswith(f"{one}.") for one in idle)


@pytest.mark.parametrize("group", GROUPS)
def test_settings_that_change_nothing_are_listed_in_one_notice(group):
    config, _, idle = loaded(group)
    text = notice(config)
    assert bool(text) is bool(idle)
    assert all(one.rpartition(".")[2] in text for one in idle)
    assert sum(not line.startswith("  ") for line in text.splitlines()) == bool(idle)


@functools.cache
def refused() -> str:
    """The message about an experiment with all refused settings except ``allocation_mode``."""
    values: dict[str, Any] = {}
    for part in SETTINGS["refused"]:
        for path, value in part["values"].items():
            if path != "allocation_mode":
                values |= NEEDED.get(path, NEEDED.get(path.partition(".")[0], {})) | {path: value}
    with pytest.raises(UsageError) as caught:
        experiment(values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        pytest.param(path, value, part["says"], id=path)
        for part in SETTINGS["refused"]
        for path, value in part["values"].items()
    ],
)
def test_a_published_value_is_refused_with_what_to_write(path, value, says):
    text = refused()
    if path == "allocation_mode":
        with pytest.raises(UsageError) as caught:
            experiment(NEEDED[path] | {path: value})
        text = str(caught.value)
    section, _, name = path.rpartition(".")
    named = (path, path.partition(".")[0], f"{section}: {name}")
    assert any(says in line and any(one in line for one in named) for line in text.splitlines())


def test_every_published_setting_has_a_row():
    table = Path(os.environ.get("ARENO_TEST_DATA", "../shared/data")).parent / "spec" / "published_settings.tsv"
    if not table.is_file():
        pytest.skip(f"{table} is absent")
    lines = table.read_text(encoding="utf-8").splitlines()
    paths = {line.split("\t")[0].replace("[]", "0") for line in lines if not line.startswith("#")}
    ours = {path for group in GROUPS for outcome in OUTCOMES for path in SETTINGS[group].get(outcome, {})}
    ours |= {path for part in SETTINGS["refused"] for path in part["values"]}
    assert paths <= ours


@pytest.mark.parametrize("kind", REMEDIES)
def test_each_kind_of_file_loads_or_is_refused_with_a_remedy(kind):
    argv = ["--config", str(FOLDER / f"{kind}.yaml")]
    if REMEDIES[kind]:
        with pytest.raises(UsageError) as caught:
            load_expr_config(argv, experiment_class(argv))
        text = str(caught.value)
        for remedy in REMEDIES[kind]:
            name = remedy.lstrip("~").partition("=")[0]
            hint = {"actor.target_modules": "write [q_proj, k_proj", "~teacher.backend": "remove the other settings"}
            hint |= {"~teacher.dtype": "remove the other settings", "workflow.kwargs.max_turns": f"write {name}=N"}
            hint |= {"rollout.agent.export_style": f"did you mean {name}?"}
            words = (
                hint.get(name) or hint.get(remedy) or (name.rpartition(".")[2] if "~" in remedy else f"write {remedy}")
            )
            assert words in text
    config, _ = load_expr_config([*argv, *REMEDIES[kind]], experiment_class(argv))
    assert notice(config).startswith("settings that are accepted but have no effect in this run:\n  ")


def test_a_cluster_launcher_task_is_not_an_experiment(tmp_path):
    file = tmp_path / "task.yaml"
    file.write_text("name: some-task\nresources: {cpus: 8+}\nrun: python3 train.py --config experiment.yaml\n")
    with pytest.raises(UsageError, match="is a task of a cluster launcher"):
        experiment_class(["--config", str(file)])
