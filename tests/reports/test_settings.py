"""A report first lists the settings that the user chose: those that differ from the defaults."""

from __future__ import annotations

import yaml

from areno.config import TrainOptions, get_algorithm
from areno.config.experiment.experiments import GRPOConfig
from areno.config.experiment.loader import config_from
from areno.config.experiment.saving import config_text
from areno.config.parser import build_options
from areno.config.yaml_io import dump_config
from areno.reports.settings import settings_of_run


def stored(algo, **values):
    return yaml.safe_load(
        dump_config(build_options({"algo": algo, "ckpt": "m", **values}, get_algorithm(algo), frozenset()))
    )


def test_options_that_differ_from_their_defaults_are_those_that_were_set():
    config = stored("grpo", lr=0.5, stop=("end",), shuffle=False, temperature=TrainOptions.temperature)
    chosen, others = map(dict, settings_of_run(config))
    assert chosen == {"algo": "grpo", "ckpt": "m", "lr": 0.5, "stop": ["end"], "shuffle": False}
    assert {"temperature", "grpo_clip_eps", "batch_size"} <= others.keys()
    assert "max_steps" not in others, "it has no value"


def test_an_option_of_the_algorithm_is_compared_with_its_default():
    (name, default) = next(
        (e.name, e.default) for e in get_algorithm("dapo").own_options() if isinstance(e.default, float)
    )
    assert name in dict(settings_of_run(stored("dapo"))[1])
    assert dict(settings_of_run(stored("dapo", **{name: default / 2}))[0])[name] == default / 2


def test_the_file_of_an_algorithm_is_not_run_by_a_report(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("raise SystemExit('was run')")
    chosen, _ = settings_of_run({"algo": f"{file}:SPEC", "knob": 3, "lr": TrainOptions.lr})
    assert dict(chosen) == {"algo": f"{file}:SPEC", "knob": 3}


def test_settings_of_an_experiment_that_differ_are_those_that_its_file_sets():
    tree = {
        **{"experiment_name": "e", "trial_name": "t", "cluster": {"fileroot": "/files"}},
        "train_dataset": {"path": "rows.jsonl", "type": "rl", "batch_size": 4},
        "actor": {"path": "model", "backend": "fsdp:d1", "optimizer": {"lr": 0.5}, "scheduling_spec": [{"mem": 7}]},
        "rollout": {"backend": "areno:d1"},
        "gconfig": {"n_samples": 3},
    }
    chosen, others = settings_of_run(yaml.safe_load(config_text(config_from(tree, GRPOConfig))))
    chosen = dict(chosen)
    assert chosen["actor.scheduling_spec.0.mem"] == 7
    assert chosen["actor.optimizer.lr"] == 0.5
    assert {name.split(".")[0] for name in chosen} == {*tree}
    assert "saver.fileroot" in dict(others), "it takes the value of cluster.fileroot"
    assert len(chosen) < 15 < len(others)


def test_a_setting_without_a_known_default_is_shown_first():
    assert settings_of_run({"own": {"a": 1, "b": None}}) == ([("own.a", 1)], [])
    config = {"experiment_name": "e", "train_dataset": {"type": "my own"}}
    assert settings_of_run(config) == ([("experiment_name", "e"), ("train_dataset.type", "my own")], [])
