"""The quickstart's command lines."""

from __future__ import annotations

import pytest

from areno.config.experiment.experiments import PPOConfig
from areno.config.experiment.legacy import LEGACY_KEYS, load_legacy_config, render_legacy_help
from areno.config.experiment.loader import settled
from areno.config.experiment.setting_declaration import paths_of, walk
from areno.errors import UsageError
from areno.experiments.run_experiment import MATH_REWARD, legacy_config

COMMAND = [
    "n_nodes=1",
    "n_gpus_per_node=8",
    "allocation_mode=sglang.d4p1m1+d2p2m1",
    "cluster.fileroot=/path/to/save/logs/checkpoints/",
    "actor.type._class=qwen3",
    "actor.path=Qwen/Qwen3-1.7B",
    "ref.type._class=qwen3",
    "ref.path=Qwen/Qwen3-1.7B",
    "dataset.path=/path/to/boba_106k_0319.jsonl",
    "dataset.train_bs_n_seqs=32",
    "group_size=8",
    "ppo.gen.max_new_tokens=4096",
    "ppo.ppo_n_minibatches=4",
    "actor_train.mb_spec.max_tokens_per_mb=32768",
    "actor_inf.mb_spec.max_tokens_per_mb=32768",
    "max_concurrent_rollouts=16",
    "max_head_offpolicyness=4",
]
ARENO_ALLOCATION = "allocation_mode=areno.d4p1m1+d4p1m1"
SHORT = ["actor.path=a/model", "dataset.path=rows.jsonl", "dataset.train_bs_n_seqs=4"]


def load(*words, asynchronous=True):
    return load_legacy_config(["main.py", *words], asynchronous=asynchronous, clock=lambda: 0.0)


def problem(*words, asynchronous=True):
    with pytest.raises(UsageError) as caught:
        load(*words, asynchronous=asynchronous)
    return str(caught.value)


def test_the_published_command_is_accepted_unchanged():
    config = load(*COMMAND)
    assert (config.rollout.backend, config.actor.backend) == ("sglang:d4", "megatron:d2p2")
    assert config.allocation_mode == "sglang.d4p1m1+d2p2m1"


def test_the_math_reward_is_the_default_unless_a_reward_is_set():
    for words, fn in (
        ((), MATH_REWARD),
        (("reward.path=a/scorer",), ""),
        (("reward.fn=mine.py:score",), "mine.py:score"),
    ):
        config = settled(legacy_config([*SHORT, *words], asynchronous=True))
        assert config.reward.fn == fn


def test_the_published_command_is_translated_key_by_key():
    config = load(*COMMAND, ARENO_ALLOCATION)
    values = {path: value for path, _, value in walk(config)}
    expected = {
        "cluster.n_nodes": 1,
        "cluster.n_gpus_per_node": 8,
        "cluster.fileroot": "/path/to/save/logs/checkpoints/",
        "saver.fileroot": "/path/to/save/logs/checkpoints/",
        "rollout.backend": "areno:d4",
        "actor.backend": "fsdp:d4",
        "actor.model_type": "qwen3",
        "ref.model_type": "qwen3",
        "actor.path": "Qwen/Qwen3-1.7B",
        "ref.path": "Qwen/Qwen3-1.7B",
        "train_dataset.path": "/path/to/boba_106k_0319.jsonl",
        "train_dataset.type": "rl",
        "train_dataset.batch_size": 32,
        "gconfig.n_samples": 8,
        "gconfig.max_new_tokens": 4096,
        "actor.max_new_tokens": 4096,
        "actor.ppo_n_minibatches": 4,
        "actor.mb_spec.max_tokens_per_mb": 32768,
        "rollout.max_concurrent_rollouts": 16,
        "rollout.max_head_offpolicyness": 4,
        "actor.recompute_logprob": True,
        "actor.use_decoupled_loss": True,
        "experiment_name": "async-ppo",
        "trial_name": "19700101T000000",
    }
    assert {path: values[path] for path in expected} == expected


def test_defaults_of_the_two_programs():
    both = [load(*SHORT, asynchronous=asynchronous) for asynchronous in (True, False)]
    values = [(c.experiment_name, c.actor.recompute_logprob, c.actor.use_decoupled_loss) for c in both]
    assert values == [("async-ppo", True, True), ("sync-ppo", False, False)]
    for config in both:
        assert config.rollout.max_concurrent_rollouts == 4
        assert config.rollout.max_head_offpolicyness == 0
        assert config.actor.adv_norm.mean_level == "batch"
        assert config.ref is None
        assert config.actor.kl_ctl == 0


def test_keys_can_make_the_asynchronous_program_synchronous():
    config = load(*SHORT, "ppo.recompute_logprob=False", "ppo.use_decoupled_loss=False", "max_head_offpolicyness=0")
    assert config.actor == load(*SHORT, asynchronous=False).actor.__class__(
        **(vars(load(*SHORT, asynchronous=False).actor) | {"experiment_name": "async-ppo"})
    )


@pytest.mark.parametrize(
    ("word", "path", "value"),
    [
        ("experiment_name=mine", "experiment_name", "mine"),
        ("trial_name=one", "trial_name", "one"),
        ("success_rate_ub=0.95", "success_rate_ub", 0.95),
        ("success_rate_lb=0.05", "success_rate_lb", 0.05),
        ("exp_ctrl.total_train_epochs=5", "total_train_epochs", 5),
        ("exp_ctrl.save_freq_epochs=1", "saver.freq_epochs", 1),
        ("exp_ctrl.save_freq_steps=null", "saver.freq_steps", None),
        ("exp_ctrl.save_freq_secs=60", "saver.freq_secs", 60),
        ("exp_ctrl.ckpt_freq_epochs=1", "recover.freq_epochs", 1),
        ("exp_ctrl.ckpt_freq_steps=10", "recover.mode", "auto"),
        ("exp_ctrl.ckpt_freq_secs=600", "recover.freq_secs", 600),
        ("ref.path=a/ref", "actor.kl_ctl", 0.1),
        ("wandb.mode=True", "stats_logger.wandb.mode", "online"),
        ("wandb.mode=offline", "stats_logger.wandb.mode", "offline"),
        ("tensorboard.path=/tb", "stats_logger.tensorboard.path", "/tb"),
        ("ppo.adv_norm=False", "actor.adv_norm", None),
        ("critic.type._class=qwen3", "critic.model_type", "qwen3"),
        ("actor.lr=1e-6", "actor.optimizer.lr", 1e-6),
        ("gconfig.temperature=0.8", "actor.temperature", 0.8),
        ("ppo.recompute_logprob=False", "actor.use_decoupled_loss", False),
        ("actor_inf.mb_spec.max_tokens_per_mb=64", "actor.mb_spec.max_tokens_per_mb", 64),
    ],
)
def test_a_key_reaches_its_setting(word, path, value):
    assert {name: setting for name, _, setting in walk(load(*SHORT, word))}[path] == value


def test_free_keys_of_a_setting_are_accepted_from_the_file_and_the_command_line(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text("workflow:\n  path: w.py:Own\n  kwargs:\n    turns: 2\n    tools: {shell: true}\n")
    config = load(f"--config={file}", *SHORT, "workflow.kwargs.turns=3", "actor.scheduling_spec.0.env_vars.A=b")
    assert config.workflow.kwargs == {"turns": 3, "tools": {"shell": True}}
    assert config.actor.scheduling_spec[0].env_vars == {"A": "b"}
    assert "workflow.kwarg.turns is neither a key" in problem(*SHORT, "workflow.kwarg.turns=3")


def test_group_normalization_uses_the_group_size():
    norm = load(*SHORT, "group_size=4", "group_adv_norm=True").actor.adv_norm
    assert (norm.mean_level, norm.std_level, norm.group_size) == ("group", "group", 4)


def test_the_smaller_of_two_actor_limits_applies():
    words = ["actor_train.mb_spec.max_tokens_per_mb=64", "actor_inf.mb_spec.max_tokens_per_mb=32"]
    assert load(*SHORT, *words).actor.mb_spec.max_tokens_per_mb == 32
    assert load(*SHORT, *reversed(words)).actor.mb_spec.max_tokens_per_mb == 32
    for limited, unlimited in (("train", "inf"), ("inf", "train")):
        words = [f"actor_{limited}.mb_spec.max_tokens_per_mb=64", f"actor_{unlimited}.mb_spec.max_tokens_per_mb=null"]
        assert load(*SHORT, *words).actor.mb_spec.max_tokens_per_mb == 64


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("ppo.ppo_minibatches=3", "did you mean ppo.ppo_n_minibatches?"),
        ("group_szie=3", "did you mean group_size?"),
        ("dataset.train_bs=3", "neither a key that --help lists"),
        ("group_size=x", "gconfig.n_samples 'x'"),
        ("ppo.adv_norm=3", "ppo.adv_norm 3: expected true or false"),
        ("trial_name=a-b", "must not contain '-'"),
        ("n_nodes=2", "cluster.n_nodes=2 needs a cluster, but scheduler.type is neither ray nor slurm"),
    ],
)
def test_mistakes_are_named(word, words):
    assert words in problem(*SHORT, word)


def test_conflicting_keys_are_refused():
    assert "remove one of the two keys" in problem(*SHORT, "ppo.recompute_logprob=False", "ppo.use_decoupled_loss=True")
    assert "contradict" in problem(*SHORT, "group_adv_norm=True", "ppo.adv_norm=False")


def test_a_reference_needs_a_path():
    for word in ("ref.type._class=qwen3", "ref_inf.mb_spec.max_tokens_per_mb=64"):
        assert "set ref.path too" in problem(*SHORT, word)
        assert load(*SHORT, word, "ref.path=a/ref").ref is not None


def test_missing_required_settings_are_named():
    text = problem()
    assert "train_dataset.path is required" in text
    assert "actor.path is required" in text


def test_the_keys_may_be_in_a_file(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(
        "group_size: 2\nppo:\n  gen:\n    max_new_tokens: 12\nactor:\n  path: a/model\ndataset:\n  path: b.jsonl\n"
    )
    config = load("--config", str(file), "group_size=4")
    assert (config.gconfig.n_samples, config.gconfig.max_new_tokens) == (4, 12)


def test_every_legacy_key_maps_to_a_setting():
    known = paths_of(PPOConfig)
    for name, key in LEGACY_KEYS.items():
        assert key.path in known, name
        assert key.help.endswith("."), name


def test_help_lists_every_key(capsys):
    with pytest.raises(SystemExit):
        load("--help", asynchronous=False)
    text = capsys.readouterr().out
    assert text == render_legacy_help(asynchronous=False)
    assert text.startswith("usage: main_sync_ppo.py")
    for name in LEGACY_KEYS:
        assert f"  {name}" in text
