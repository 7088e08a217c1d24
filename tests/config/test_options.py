import dataclasses
import subprocess
import sys

import pytest

from areno.config import TrainOptions, option, options_of
from areno.config.options import GROUPS, convert, nearest
from areno.errors import ArenoError, UsageError

BY_NAME = {entry.name: entry for entry in options_of(TrainOptions)}


def test_every_option_is_in_a_known_group_and_has_help():
    assert all(entry.info.group in GROUPS and entry.info.help.endswith(".") for entry in BY_NAME.values())


def test_every_field_is_an_option_except_explicit_and_extra():
    assert {field.name for field in dataclasses.fields(TrainOptions)} - set(BY_NAME) == {"explicit", "extra"}


def test_defaults_are_the_documented_ones():
    options = TrainOptions()
    documented = {
        "algo": "gspo", "epochs": 10, "max_steps": None, "batch_size": 32, "n_samples": 8, "max_prompt_tokens": 1024,
        "max_new_tokens": 3071, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "greedy": False, "attn_backend": "flash",
        "agent_timeout_s": 300.0, "mem_frac": 0.9, "tune_max_samples": 256, "mini_bs": 16, "lr": 1e-6, "min_lr": 1e-7,
        "gradient_accumulation_steps": None, "activation_checkpointing": True, "lr_decay_steps": 1000,
        "lr_decay_style": "cosine", "adam_beta1": 0.9, "adam_beta2": 0.999, "weight_decay": 0.01, "grad_clip_norm": 1.0,
        "critic_lr": 1e-5, "critic_warmup_steps": 20, "gspo_clip_eps": 3e-4, "grpo_clip_eps": 0.2, "dpo_beta": 0.1,
        "use_kl_loss": True, "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl", "clip_eps": 0.2, "clip_ratio_c": 3.0,
        "value_clip_eps": 0.5, "value_loss_coef": 0.5, "gamma": 1.0, "lam": 0.95, "save_interval": 100,
    }  # fmt: skip
    assert {name: getattr(options, name) for name in documented} == documented


def test_defaults_satisfy_their_own_bounds_and_choices():
    for entry in BY_NAME.values():
        if entry.default is not None and not entry.many and entry.kind in (int, float):
            assert not entry.bounds_problem(entry.default), entry.name
        if entry.info.choices:
            assert entry.default in entry.info.choices


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("epochs", "12", 12), ("lr", "1e-5", 1e-5), ("lr", 1, 1.0), ("ckpt", 7, "7"), ("shuffle", False, False),
        ("stop", "END", ("END",)), ("stop", ["a", "b"], ("a", "b")), ("stop_token_ids", ["1,2", "3"], (1, 2, 3)),
        ("stop_token_ids", [4, 5], (4, 5)), ("stop", ["a,b"], ("a,b",)),
    ],
)  # fmt: skip
def test_strings_and_yaml_values_are_converted_alike(name, raw, value):
    assert convert(BY_NAME[name], raw, name) == value


@pytest.mark.parametrize(
    ("name", "raw"),
    [("epochs", "1.5"), ("epochs", True), ("epochs", 2.0), ("lr", "fast"), ("shuffle", "yes"), ("ckpt", ["a"])],
)
def test_wrong_types_name_option_and_value(name, raw):
    with pytest.raises(UsageError, match=f"--{name} .*expected") as caught:
        convert(BY_NAME[name], raw, f"--{name}")
    assert repr(raw) in str(caught.value)


@pytest.mark.parametrize(("name", "raw"), [("ckpt", True), ("stop", ["END", True])])
def test_a_yaml_boolean_is_no_text(name, raw):
    with pytest.raises(UsageError, match=f"--{name} true: expected text, not a boolean; put words"):
        convert(BY_NAME[name], raw, f"--{name}")


def test_an_option_type_that_no_flag_can_carry_is_refused():
    wrong = dataclasses.make_dataclass("Wrong", [("table", dict, option(None, help="A table."))])
    with pytest.raises(UsageError, match=r"Wrong\.table"):
        options_of(wrong)


def test_nearest_corrects_typos_and_ignores_nonsense():
    assert nearest("epoch", BY_NAME) == " (did you mean epochs?)"
    assert nearest("zzzzzz", BY_NAME) == ""


def test_paths_follow_the_run_directory_unless_set():
    options = TrainOptions(run_dir="r")
    assert (str(options.checkpoint_path), str(options.events_path)) == ("r/checkpoints", "r/events")
    moved = dataclasses.replace(options, save_path="s", metrics_log_dir="m")
    assert (str(moved.checkpoint_path), str(moved.events_path)) == ("s", "m")
    with pytest.raises(ArenoError, match="run_dir is not set"):
        _ = TrainOptions().run_path


def test_running_sequences_default_to_the_whole_batch():
    assert TrainOptions(batch_size=4, n_samples=3).running_sequences == 12
    assert TrainOptions(max_running_prompts=5).running_sequences == 5


def test_config_imports_no_torch():
    code = (
        "import sys, areno, areno.config, areno.config.validate, areno.config.summary, areno.config.resume\n"
        "from areno.config import TrainOptions, get_algorithm\n"
        "get_algorithm('gspo')\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'numpy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
