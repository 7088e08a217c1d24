"""Which adapter options are accepted, and the messages about the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areno.config.eval_options import parse_export
from areno.config.packages import install_command
from areno.config.parser import parse_train
from areno.config.paths import base_of, ckpt_problem, is_adapter, tokenizer_of
from areno.config.resume import apply_resume
from areno.config.validate import validate
from areno.config.yaml_io import stored_values
from areno.engine.checkpoint.export import export_model
from areno.errors import UsageError
from tests.config.workspace import GSPO, SFT

LORA = ["--lora-rank", "8"]


def check(*argv):
    options = apply_resume(parse_train([*argv]))
    validate(options)
    return options


def save_adapter(folder: Path, base: str = "model") -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "peft_type": "LORA"}))
    return folder.name


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    """Pretend that all packages are installed, because the rules do not depend on it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


@pytest.mark.parametrize(
    "argv",
    [
        [*GSPO, *LORA],
        [*GSPO, *LORA, "--lora-alpha", "32", "--lora-target-modules", "q_proj,v_proj", "--load-in-4bit"],
        [*SFT, *LORA, "--lora-dropout", "0.1"],
        [*GSPO, *LORA, "--lora-dropout", "0"],
        [*GSPO, "--lora-adapter-path", "adapter"],
        [*GSPO[2:], "--ckpt", "adapter"],
    ],
)
def test_adapters_that_work_are_accepted(workspace, argv):
    save_adapter(workspace / "adapter")
    check(*argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lora-rank", "-1"], "--lora-rank must be non-negative, got -1"),
        (["--lora-alpha", "8"], "--lora-alpha 8.0 has no effect without an adapter; set --lora-rank too"),
        (
            ["--lora-rank", "0", "--load-in-4bit"],
            "--load-in-4bit has no effect without an adapter; set --lora-rank too",
        ),
        (["--lora-target-modules", "q_proj"], "--lora-target-modules q_proj has no effect without an adapter"),
        ([*LORA, "--lora-dropout", "0.1"], "--lora-dropout 0.1: rollouts of gspo have no dropout"),
        ([*LORA, "--lora-dropout", "1"], "--lora-dropout must be below 1, got 1.0"),
        ([*LORA, "--lora-alpha", "0"], "--lora-alpha must be positive, got 0.0"),
        (
            [*LORA, "--lora-adapter-path", "adapter"],
            "--lora-rank 8 has no effect with --lora-adapter-path, because the adapter's adapter_config.json sets",
        ),
        (["--lora-adapter-path", "gone"], "--lora-adapter-path folder does not exist: gone; pass the folder of a PEFT"),
        (["--lora-adapter-path", "model"], "--lora-adapter-path model has no adapter_config.json"),
        (
            [*LORA, "--load-in-4bit", "--world-size", "2", "--tp-size", "2"],
            "--load-in-4bit with --tp-size 2: 4-bit weights cannot be sharded; remove --load-in-4bit, or",
        ),
        (
            [*LORA, "--ckpt", "adapter"],
            "--ckpt adapter is an adapter, not a model; pass its base model as --ckpt and the adapter as "
            "--lora-adapter-path adapter, or first merge the adapter with `areno export`",
        ),
        (
            ["--ckpt", "orphan"],
            "--ckpt orphan/adapter_config.json: base_model_name_or_path folder does not exist: ./gone",
        ),
        (
            ["--ckpt", "stacked"],
            "the base model adapter is itself an adapter; merge adapter into its own base model with `areno export`",
        ),
        (["--ckpt", "blank"], "has no base_model_name_or_path; add the base model's folder or repo id"),
    ],
)
def test_adapters_that_cannot_work_are_refused_with_a_remedy(workspace, argv, message):
    for name, base in (("adapter", "model"), ("orphan", "./gone"), ("stacked", "adapter"), ("blank", "")):
        save_adapter(workspace / name, base)
    with pytest.raises(UsageError) as caught:
        check(*GSPO, *argv)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "package", "message"),
    [
        (LORA, "peft", f"--lora-rank needs the packages peft; install them: {install_command('lora')}"),
        (
            [*LORA, "--load-in-4bit"],
            "bitsandbytes",
            f"--load-in-4bit needs the packages bitsandbytes; install them: {install_command('qlora')}",
        ),
    ],
)
def test_a_missing_package_is_named_with_its_extra(workspace, monkeypatch, argv, package, message):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else name)
    with pytest.raises(UsageError) as caught:
        check(*GSPO, *argv)
    assert message in str(caught.value)
    check(*GSPO)


def test_a_run_without_an_adapter_stores_only_that_it_has_none(workspace):
    stored = stored_values(check(*GSPO))
    assert {name for name in stored if "lora" in name or "4bit" in name} == {"lora_rank", "lora_adapter_path"}
    assert stored_values(check(*GSPO, *LORA))["lora_target_modules"] == "all-linear"


def test_an_adapter_folder_resolves_to_its_base_model_and_its_own_tokenizer(workspace):
    place = save_adapter(workspace / "adapter")
    assert is_adapter(place)
    assert (base_of(place), base_of("model"), base_of("Qwen/Qwen3-0.6B")) == ("model", "model", "Qwen/Qwen3-0.6B")
    assert ckpt_problem(place) == ""
    assert tokenizer_of(place) == "model"
    (workspace / "adapter" / "tokenizer_config.json").write_text("{}")
    assert tokenizer_of(place) == "adapter"
    (workspace / "adapter" / "config.json").write_text("{}")
    assert not is_adapter(place)  # a full model in the same folder as an adapter


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--ckpt is required"),
        (["--ckpt", "model"], "--output is required; give the folder to write"),
        (["--ckpt", "gone/", "--output", "new"], "--ckpt folder does not exist: gone/"),
        (["--ckpt", "model", "--output", "model"], "--output model is not empty; choose a new folder"),
        (["--ckpt", "model", "--output", "new", "--dtype", "int4"], "--dtype 'int4' is unknown; choose auto"),
        (["--ckpt", "model", "--output", "new", "--outptu", "x"], "--outptu is not an option (did you mean --output?)"),
    ],
)
def test_an_export_that_cannot_work_is_refused(workspace, argv, message):
    with pytest.raises(UsageError) as caught:
        parse_export(argv)
    assert message in str(caught.value)


def test_the_rank_of_an_adapter_comes_from_the_option_or_the_adapter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    adapter = tmp_path / save_adapter(tmp_path / "adapter")
    assert parse_train(SFT).adapter_rank is None
    assert parse_train([*SFT, *LORA]).adapter_rank == 8
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"r": 32}))
    assert parse_train([*SFT, "--lora-adapter-path", str(adapter)]).adapter_rank == 32


def test_a_model_that_is_nowhere_is_refused_by_the_export(tmp_path):
    with pytest.raises(UsageError, match="no/where is neither a folder nor a model in the Hugging Face cache"):
        export_model("no/where", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
