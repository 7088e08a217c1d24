import dataclasses

import pytest
import yaml
from omegaconf import OmegaConf

from areno.config import TrainOptions
from areno.config.parser import parse_train
from areno.config.yaml_io import dump_config, load_config, read_mapping
from areno.errors import UsageError
from tests.config.workspace import GSPO, SFT


def round_trip(options, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(options), encoding="utf-8")
    again = parse_train(["--config", str(file)])
    return dataclasses.replace(again, config=options.config, explicit=options.explicit)


@pytest.mark.parametrize(
    "argv",
    [
        GSPO,
        SFT,
        [*GSPO, "--lr", "3e-7", "--stop", "Ende: ä\n", "--stop", "#", "--stop-token-ids", "5,6", "--no-shuffle"],
        [*GSPO, "--greedy", "--lr-decay-style", "constant", "--max-steps", "3", "--save-path", "elsewhere"],
        [*GSPO, "--algo", "grpo", "--grpo-clip-eps", "0.3", "--seed", "12345"],
        [*GSPO, "--algo", "grpo", "--kl-coef", "0.1", "--ref-ckpt", ""],
    ],
)
def test_stored_options_are_equal_when_read_back(argv, tmp_path):
    options = parse_train(argv)
    assert round_trip(options, tmp_path) == options


def test_a_stored_config_is_complete_and_plain_yaml():
    loaded = yaml.safe_load(dump_config(TrainOptions()))
    assert loaded["epochs"] == 10
    assert loaded["lr"] == 1e-6
    assert isinstance(loaded["lr"], float)
    assert {"device", "dtype", "seed", "gspo_clip_eps", "temperature"} <= loaded.keys()


def test_a_stored_config_omits_options_that_the_run_does_not_read():
    loaded = yaml.safe_load(dump_config(TrainOptions(algo="sft")))
    assert not {"n_samples", "gspo_clip_eps", "agent_fn", "tune_params", "run_dir", "resume"} & loaded.keys()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a\n- b", "must contain a mapping, but contains a list"),
        ("lr: [1", "line 1 is not valid YAML"),
        ("lr: 1\nepochs: 2\nlr: 3", "line 3 is not valid YAML: duplicate key 'lr'"),
        ("batch-size: 1\nbatch_size: 2", "with dashes and with underscores"),
        ("3: 4", "the key 3 is not text"),
        ("optimizer: {lr: 1}", "optimizer is a mapping"),
    ],
)
def test_errors_about_malformed_files_name_the_file_and_the_place(tmp_path, text, expected):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=expected) as caught:
        load_config(file)
    assert str(file) in str(caught.value)


def test_merge_keys_are_resolved_as_in_an_experiment_file(tmp_path):
    file = tmp_path / "merged.yaml"
    file.write_text("x: {y: &inner {<<: &base {lr: 1, seed: 2}, lr: 3}}\nz: {<<: *inner, seed: 4}\n<<: *base\nlr: 5\n")
    merged = read_mapping(file, "--from")
    assert merged == OmegaConf.to_container(OmegaConf.load(file))
    assert merged == {"x": {"y": {"lr": 3, "seed": 2}}, "z": {"lr": 3, "seed": 4}, "lr": 5, "seed": 2}


def test_missing_and_binary_files_are_usage_errors(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        load_config(tmp_path / "binary.yaml")


def test_an_empty_file_sets_nothing(tmp_path):
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load_config(tmp_path / "empty.yaml") == {}
