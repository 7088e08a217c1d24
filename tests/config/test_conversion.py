"""Conversion of other tools' configurations to commands: names exist on both sides, and the command is equivalent."""

from __future__ import annotations

import importlib.util
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from areno.cli.main import main
from areno.config.algorithms import get_algorithm
from areno.config.all_train_options import TrainOptions
from areno.config.conversion import convert
from areno.config.conversion_tables import TRL, VERL
from areno.config.options import options_of
from areno.config.parser import extra_options, parse_train
from areno.config.validate import validate
from areno.errors import UsageError
from tests.config.workspace import BASE, GSPO

REPO = Path(__file__).resolve().parents[2]
GRPO = {
    "model_name_or_path": "model",
    "dataset_name": "rows.jsonl",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 8,
    "num_generations": 8,
    "learning_rate": "1e-5",
    "beta": 0.04,
    "loss_type": "dr_grpo",
    "epsilon": 0.1,
    "use_peft": True,
    "lora_r": 16,
    "optim": "adamw_8bit",
    "report_to": "wandb",
}


def test_every_name_is_a_setting_of_trl():
    trl = pytest.importorskip("trl")
    known = {
        one.name for kind in (trl.GRPOConfig, trl.SFTConfig, trl.DPOConfig, trl.ModelConfig) for one in fields(kind)
    }
    known |= {one.name for one in fields(trl.ScriptArguments)}
    assert set(TRL) <= known


def test_rows_per_device_become_prompts_per_step():
    converted = convert("trl", GRPO, devices=2)
    assert converted.words[:2] == ["--algo", "grpo"]
    pairs = dict(zip(converted.words[::2], converted.words[1::2], strict=False))
    assert (pairs["--batch-size"], pairs["--mini-bs"], pairs["--world-size"]) == ("8", "8", "2")
    assert (pairs["--n-samples"], pairs["--kl-coef"], pairs["--grpo-clip-eps"]) == ("8", "0.04", "0.1")
    assert pairs["--grpo-loss-mean"] == "dr_grpo"
    assert {"--adam-8bit", "--lora-rank", "--track"} <= set(converted.words)
    parse_train(converted.words)
    assert converted.notes == []


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        (
            "grpo",
            {"importance_sampling_level": "sequence", "epsilon": 3e-4},
            ["--algo", "gspo", "--gspo-clip-eps", "0.0003"],
        ),
        ("dpo", {"beta": 0.2, "loss_type": "ipo"}, ["--algo", "dpo", "--dpo-beta", "0.2", "--dpo-loss-type", "ipo"]),
        ("sft", {"max_length": 512, "packing": True}, ["--algo", "sft", "--max-context-len", "512"]),
        ("grpo", {"scale_rewards": "none", "lora_r": 8}, ["--algo", "grpo", "--advantage", "group_mean"]),
    ],
)
def test_each_kind_of_training_has_its_algorithm(kind, settings, expected):
    words = convert("trl", settings, kind).words
    parse_train(words)
    assert [word for word in words if word in expected] == expected
    assert "--lora-rank" not in words


def test_verl_mini_batches_become_optimizer_steps_of_one_batch():
    actor = "actor_rollout_ref.actor"
    settings = {
        "algorithm.adv_estimator": "grpo",
        "data.train_batch_size": 1024,
        f"{actor}.ppo_mini_batch_size": 256,
        f"{actor}.ppo_micro_batch_size_per_gpu": 4,
        f"{actor}.use_kl_loss": True,
        f"{actor}.kl_loss_coef": 0.001,
        f"{actor}.clip_ratio": 0.2,
        "trainer.n_gpus_per_node": 8,
        "trainer.logger": ["console", "wandb"],
        "trainer.unheard_of": 1,
    }
    converted = convert("verl", settings)
    pairs = dict(zip(converted.words[::2], converted.words[1::2], strict=False))
    assert (pairs["--batch-size"], pairs["--update-minibatches"], pairs["--mini-bs"]) == ("1024", "4", "32")
    assert (pairs["--kl-coef"], pairs["--grpo-clip-eps"], pairs["--track"]) == ("0.001", "0.2", "wandb")
    parse_train(converted.words)
    assert converted.notes == ["trainer.unheard_of=1: no equivalent"]
    ppo = convert("verl", {"algorithm.gamma": 0.9, f"{actor}.clip_ratio": 0.1})
    assert ppo.words == ["--algo", "ppo", "--clip-eps", "0.1", "--no-use-kl-loss", "--gamma", "0.9"]


@pytest.mark.parametrize(
    ("estimator", "settings", "expected"),
    [
        ("gae", {}, (False, None, "low_var_kl")),
        ("gae", {"use_kl_loss": False, "kl_loss_coef": 0.01, "kl_loss_type": "k1"}, (False, None, "low_var_kl")),
        ("gae", {"use_kl_loss": True}, (True, 0.001, "low_var_kl")),
        ("gae", {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k1"}, (True, 0.01, "k1")),
        ("grpo", {"use_kl_loss": True}, (None, 0.001, "low_var_kl")),
        ("grpo", {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "mse"}, (None, 0.01, "mse")),
        ("grpo", {"use_kl_loss": True, "kl_loss_coef": 0.0, "kl_loss_type": "mse"}, (None, 0.0, "low_var_kl")),
        ("grpo", {"kl_loss_coef": 0.01, "kl_loss_type": "mse"}, (None, 0.0, "low_var_kl")),
    ],
)
@pytest.mark.usefixtures("workspace")
def test_the_kl_loss_of_verl_is_off_by_default_and_has_the_option_of_its_algorithm(estimator, settings, expected):
    """With the defaults of verl: use_kl_loss False, kl_loss_coef 0.001, and kl_loss_type low_var_kl."""
    settings = {f"actor_rollout_ref.actor.{name}": value for name, value in settings.items()}
    converted = convert("verl", {"algorithm.adv_estimator": estimator, "critic.optim.lr": 1e-5, **settings})
    options = parse_train([*GSPO, *converted.words])
    validate(options)
    on, coefficient, kind = expected
    if on is not None:
        assert options.use_kl_loss is on
    if coefficient is not None:
        assert (options.kl_coef if on is None else options.kl_loss_coef) == coefficient
    assert (options.kl_loss_type, converted.notes) == (kind, [])


@pytest.mark.usefixtures("workspace")
def test_pairs_per_device_become_rows_per_microbatch():
    for pairs in (1, 4):
        settings = {"per_device_train_batch_size": pairs, "gradient_accumulation_steps": 2}
        options = parse_train([*BASE, *convert("trl", settings, "dpo", devices=2).words])
        validate(options)
        assert (options.batch_size, options.mini_bs) == (4 * pairs, 4 * pairs)


@pytest.mark.usefixtures("workspace")
def test_dropout_is_converted_only_if_the_algorithm_accepts_it():
    settings = {"use_peft": True, "lora_r": 8, "lora_dropout": 0.05}
    grpo, dpo = convert("trl", settings), convert("trl", settings, "dpo")
    assert ["lora_dropout=0.05: supported only for SFT and DPO" in note for note in grpo.notes] == [True]
    assert dpo.notes == convert("trl", settings | {"lora_dropout": 0.0}).notes == []
    for words, dropout in (([*GSPO, *grpo.words], 0.0), ([*BASE, *dpo.words], 0.05)):
        options = parse_train(words)
        validate(options)
        assert options.lora_dropout == dropout


@pytest.mark.parametrize(
    ("tool", "settings", "words", "noted"),
    [
        ("trl", {"warmup_steps": 0.03}, [], "warmup_steps=0.03: areno takes a number of steps"),
        ("trl", {"warmup_steps": 0}, [], ""),
        ("trl", {"save_steps": 0.1}, [], "save_steps=0.1: areno takes a number of steps"),
        ("trl", {"eval_steps": 0.2}, [], "eval_steps=0.2: areno takes a number of steps"),
        ("trl", {"save_steps": 500.0}, ["--save-interval", "500"], ""),
        ("trl", {"save_total_limit": 0}, [], ""),
        ("trl", {"save_total_limit": 2}, ["--keep-checkpoints", "2"], ""),
        ("trl", {"num_train_epochs": 2.5}, [], "num_train_epochs=2.5: --epochs takes only whole"),
        ("trl", {"num_train_epochs": 0.5}, [], "num_train_epochs=0.5: --epochs takes only whole"),
        ("trl", {"num_train_epochs": 3.0}, ["--epochs", "3"], ""),
        ("trl", {"optim": "adafactor"}, [], "optim=adafactor: areno supports only AdamW"),
        ("trl", {"optim": "lion_8bit"}, [], "optim=lion_8bit: areno supports only AdamW"),
        ("trl", {"optim": "adamw_torch_fused"}, [], ""),
        ("trl", {"optim": "paged_adamw_8bit"}, ["--adam-8bit"], ""),
        ("trl", {"lr_scheduler_type": "polynomial"}, [], "lr_scheduler_type=polynomial: not converted"),
        ("trl", {"lr_scheduler_type": "constant_with_warmup"}, ["--lr-decay-style", "constant"], ""),
        ("trl", {"lora_target_modules": ["q_proj"]}, [], ""),
        ("trl", {"scale_rewards": True}, [], ""),
        ("trl", {"report_to": ["wandb", "mlflow"]}, ["--track", "wandb", "--track", "mlflow"], ""),
        ("trl", {"report_to": ["wandb", "clearml"]}, ["--track", "wandb"], "report_to=clearml: not converted"),
        ("verl", {"trainer.logger": ["console", "mlflow"]}, ["--track", "mlflow"], ""),
        ("verl", {"data.train_files": "a.parquet"}, ["--dataset-path", "a.parquet"], ""),
        ("verl", {"data.val_files": ["a.parquet"]}, ["--eval-dataset-path", "a.parquet"], ""),
        ("verl", {"data.train_files": ["a.parquet", "b.parquet"]}, [], "areno reads one file"),
        ("verl", {"trainer.n_gpus_per_node": None, "actor_rollout_ref.actor.strategy": "fsdp2"}, ["--fsdp"], ""),
        ("verl", {"actor_rollout_ref.actor.strategy": "megatron"}, [], "strategy=megatron: for megatron"),
        ("verl", {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum"}, [], "token-sum: no equivalent"),
        ("verl", {"actor_rollout_ref.actor.loss_agg_mode": "token-mean"}, ["--grpo-loss-mean", "token"], ""),
    ],
)
def test_a_value_without_an_equivalent_is_noted_and_a_default_is_not(tool, settings, words, noted):
    if tool == "verl":
        settings |= {"algorithm.adv_estimator": "grpo"}
    converted = convert(tool, settings)
    before = convert(tool, {name: value for name, value in settings.items() if "adv_estimator" in name}).words
    assert converted.words == [*before, *words]
    assert len(converted.notes) == bool(noted)
    assert noted in "".join(converted.notes)


@pytest.mark.parametrize(
    ("tool", "settings", "message"),
    [
        ("trl", {"num_train_epochs": "three"}, "num_train_epochs=three: expected a number"),
        ("trl", {"max_steps": float("inf"), "num_train_epochs": float("inf")}, "num_train_epochs=inf: expected a number"),
        ("trl", {"beta": "low"}, "beta=low: expected a number"),
        ("trl", {"num_generations": 0}, "num_generations=0: expected a whole number above 0"),
        ("trl", {"num_generations": 2.5}, "num_generations=2.5: expected a whole number above 0"),
        ("verl", {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_type": "mse",
                  "actor_rollout_ref.actor.kl_loss_coef": "x"}, "kl_loss_coef=x: expected a number"),
        ("verl", {"data.train_batch_size": 8, "actor_rollout_ref.actor.ppo_mini_batch_size": "x"},
         "ppo_mini_batch_size=x: expected a whole number above 0"),
    ],
)  # fmt: skip
def test_a_value_that_is_not_a_number_is_an_error_that_names_it(tool, settings, message):
    with pytest.raises(UsageError, match=message):
        convert(tool, settings)


@pytest.mark.parametrize(
    ("tool", "kind", "settings", "noted"),
    [
        ("trl", "grpo", {"loss_type": "cispo"}, True),
        ("trl", "grpo", {"loss_type": "bnpo"}, False),
        ("trl", "dpo", {"loss_type": ["ipo"]}, False),
        ("trl", "dpo", {"loss_type": ["sigmoid", "sft"]}, True),
        ("verl", "", {"algorithm.adv_estimator": "opo"}, True),
        ("verl", "", {"algorithm.adv_estimator": "rloo_vectorized"}, False),
        ("verl", "", {"actor_rollout_ref.actor.policy_loss.loss_mode": "kl_cov"}, True),
    ],
)
def test_a_loss_or_estimator_without_an_equivalent_is_noted(tool, kind, settings, noted):
    converted = convert(tool, settings, kind)
    parse_train(converted.words)
    assert [note.startswith(f"{next(iter(settings))}=") and "not converted" in note for note in converted.notes] == [
        True
    ] * noted


def test_values_in_lists_are_read():
    assert "--track wandb" in " ".join(convert("trl", {"report_to": ["tensorboard", "wandb"][1:]}).words)
    words = convert("trl", {"loss_type": ["ipo"]}, "dpo").words
    assert words[words.index("--dpo-loss-type") + 1] == "ipo"
    assert "rloo" in convert("verl", {"algorithm.adv_estimator": "rloo_vectorized"}).words


@pytest.mark.parametrize("rules", [TRL, VERL], ids=["trl", "verl"])
def test_every_option_of_the_tables_exists(rules):
    entries = [*options_of(TrainOptions), *(e for algo in ("gspo", "ppo") for e in extra_options(get_algorithm(algo)))]
    known = {flag for entry in entries for flag in (entry.flag, "--no-" + entry.flag.removeprefix("--"))}
    for name, rule in rules.items():
        assert rule.option in known or (not rule.option and rule.note), name
        assert set(re.findall(r"--[a-z0-9-]+", rule.note)) <= known, name


@pytest.mark.parametrize("text", ["You are: a: b", "You are: brief", "@x", "[a", "{a"])
def test_arguments_are_text_unless_they_are_yaml(text, capsys):
    assert (
        main(["convert", "trl", "--learning-rate=2e-5", "--system_prompt", text, f"--model_name_or_path={text}"]) == 0
    )
    shown = capsys.readouterr()
    assert "--lr 2e-5" in shown.out
    assert shlex.join(["--ckpt", text]) in shown.out
    assert f"system_prompt={text}: " in shown.err


def test_files_and_arguments_are_read_alike_and_the_last_wins(tmp_path, capsys):
    flat, nested = tmp_path / "trl.yaml", tmp_path / "verl.yaml"
    flat.write_text("learning_rate: 1.0e-5\nmodel_name_or_path: a model\n")
    nested.write_text("data:\n  train_batch_size: 64\nalgorithm:\n  adv_estimator: grpo\n")
    assert main(["convert", "trl", str(flat), "--learning-rate", "2e-5", "--num_generations=4"]) == 0
    words = shlex.split(capsys.readouterr().out.replace("\\\n", " "))
    assert words[:2] == ["areno", "train"]
    read = parse_train(words[2:])
    assert (read.lr, read.ckpt, read.n_samples) == (2e-5, "a model", 4)
    assert main(["convert", "verl", str(nested), "actor_rollout_ref.rollout.n=5", "trainer.unheard_of=1"]) == 0
    captured = capsys.readouterr()
    assert "--n-samples 5" in captured.out
    assert "--batch-size 64" in captured.out
    assert "trainer.unheard_of=1: no equivalent" in captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trl"], "give a YAML file, or settings"),
        (["trl", "grpo"], "grpo is neither a YAML file nor a setting"),
        (["trl", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["--devices", "0", "trl", "--seed", "1"], "--devices must be at least 1, got 0"),
    ],
)
def test_invalid_input_is_refused(words, message, capsys):
    assert main(["convert", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_page_agrees_with_the_tables():
    spec = importlib.util.spec_from_file_location("make_coming_from", REPO / "docs" / "make_coming_from.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.render(), "run: python docs/make_coming_from.py"
