"""Explicit settings: the grammar of overrides, text that looks like another YAML value, and values that equal a default."""

from __future__ import annotations

import pytest

from areno.config.experiment import GRPOConfig, config_from, load_expr_config, save_config, settled
from areno.config.experiment.tree import Override, parse_override
from tests.config.experiment.samples import RL, changed, write


def load(tmp_path, *overrides, tree=RL):
    return load_expr_config(["--config", write(tmp_path / "run.yaml", tree), *overrides], GRPOConfig)[0]


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("a.b=1", "a.b", 1),
        ("+a.b=1", "a.b", 1),
        ("++a=1e-4", "a", 1e-4),
        ("a=null", "a", None),
        ("a=", "a", ""),
        ("a=[x, 2]", "a", ["x", 2]),
        ("a=[x,y]", "a", ["x", "y"]),
        ("a={k: 1}", "a", {"k": 1}),
        ("a={k:1,l:x}", "a", {"k": 1, "l": "x"}),
        ("a=fsdp:d4", "a", "fsdp:d4"),
        ("a=megatron:(attn:d4|ffn:d4)", "a", "megatron:(attn:d4|ffn:d4)"),
        ("a='007'", "a", "007"),
        ("a=${b.c}", "a", "${b.c}"),
        ("a[0].b=2", "a.0.b", 2),
        ("a=x=y", "a", "x=y"),
        ("a=@x", "a", "@x"),
        ("a=true", "a", True),
    ],
)
def test_the_grammar_of_overrides(text, path, value):
    assert parse_override(text) == Override(path, value)


@pytest.mark.parametrize(
    "text", ["2024_01", "0123", "1:30", "1e5", "true", "on", "0x1F", "fix bug #3", "#42", "- a: b", "key: value", "*x"]
)
def test_a_text_setting_keeps_the_text_of_an_override(tmp_path, text):
    config = load(tmp_path, f"+stats_logger.wandb.notes={text}", f"gconfig.stop={text}", f"actor.path={text}")
    assert (config.stats_logger.wandb.notes, config.gconfig.stop, config.actor.path) == (text, [text], text)
    saved = save_config(config, tmp_path / "saved.yaml")
    assert load_expr_config(["--config", str(saved)], GRPOConfig)[0] == config


@pytest.mark.parametrize(
    ("written", "notes"),
    [("null", None), ("~", None), ("", ""), ("'null'", "null"), ('" # 3"', " # 3"), ("${trial_name}_1", "2024_01_1")],
)
def test_null_quotes_and_interpolations_keep_their_meaning_in_text_settings(tmp_path, written, notes):
    config = load(tmp_path, f"stats_logger.wandb.notes={written}", "trial_name=2024_01", "experiment_name=0123")
    assert (config.stats_logger.wandb.notes, config.saver.trial_name) == (notes, "2024_01")
    assert config.experiment_name == config.rollout.experiment_name == "0123"


def test_the_items_of_a_list_of_text_keep_their_text(tmp_path):
    file = changed(RL, {"gconfig.stop": ["a", "b"]})
    assert load(tmp_path, "gconfig.stop=[0123, '1:30', no]").gconfig.stop == ["0123", "1:30", "no"]
    assert load(tmp_path, "gconfig.stop[1]=0123", tree=file).gconfig.stop == ["a", "0123"]
    assert load(tmp_path, "gconfig.stop_token_ids=[0x10, 3]").gconfig.stop_token_ids == [16, 3]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"ref": {}, "actor.kl_ctl": 0.1, "actor.kl_loss_coef": 0.001}, {"kl_ctl": 0.1, "kl_loss_coef": 0.001}),
        ({"actor.algorithm": "dapo", "actor.eps_clip_higher": None}, {"eps_clip_higher": None}),
        ({"actor.algorithm": "cispo", "actor.use_cispo_loss": False}, {"use_cispo_loss": False}),
    ],
)
def test_settling_keeps_explicit_values_that_equal_a_default(changes, expected):
    config = config_from(changed(RL, changes), GRPOConfig)
    once = settled(config)
    assert once == settled(once) == config
    assert {name: getattr(once.actor, name) for name in expected} == expected
    once.actor.kl_estimator, once.seed = "k1", 7  # a later change in Python takes effect too
    assert (settled(once).seed, settled(once).actor) == (7, config.actor)
