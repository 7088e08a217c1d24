"""``areno replay`` of experiments: bit for bit with the same settings, without a rollout engine or a reward."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from safetensors.numpy import load_file

from areno.cli.main import main
from areno.config.experiment.saving import save_config
from areno.experiments.replay import replay_config
from tests.experiments.trainer_stage import run_kind, settings_of_kind
from tests.replay.conftest import of_step
from tests.replay.test_replay import contents, tensors

SAVED = {"recover.mode": "auto", "recover.freq_steps": 1, "rollout.save_rollouts": "2", "total_train_steps": 3}
TRACKED = {"wandb": "offline", "swanlab": "local", "trackio": "local", "mlflow": "enabled"}
KINDS = {
    "decoupled": {
        **{"actor.use_decoupled_loss": True, "actor.ppo_n_minibatches": 2, "actor.eps_clip": 0.001},
        **{"actor.kl_ctl": 0.1, "ref.path": "CHECKPOINT"},
    },
    "critic": {"critic.path": "CHECKPOINT", "critic.backend": "fsdp:d1", "critic.optimizer.lr": 0.01},
    "recomputed": {
        **{"actor.recompute_logprob": True, "actor.mask_no_eos_with_zero": True},
        "gconfig.stop_token_ids": list(range(5, 60)),  # some answers end, and only those are trained on
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_checkpoint):
    root = tmp_path_factory.mktemp("experiments")

    @functools.cache
    def of(name):
        changes = {key: str(tiny_checkpoint) if value == "CHECKPOINT" else value for key, value in KINDS[name].items()}
        return run_kind("rl", tiny_checkpoint, root / name, SAVED | changes).folder

    return of


def replay(run, *more):
    return main(["replay", str(run), "--step", "2", *map(str, more)])


def replayed_run(out):
    (run,) = (path.parent for path in out.rglob("metrics.jsonl"))
    return run


def update_of(run):
    (record,) = of_step(run, 2)
    return {name: value for name, value in record.items() if name.startswith(("ppo_actor/update/", "ppo_critic/"))}


@pytest.mark.parametrize("name", KINDS)
def test_the_same_settings_give_the_recorded_update_bit_for_bit(name, runs, tmp_path, capsys):
    run, out = runs(name), tmp_path / "out"
    before = contents(run.resolve().parents[3])
    capsys.readouterr()
    assert replay(run, "--out", out) == 0
    shown = capsys.readouterr().out
    assert contents(run.resolve().parents[3]) == before, "log folder and checkpoints are only read"
    recorded, replayed = update_of(run), update_of(replayed_run(out))
    of_rows = {name for name in recorded if "/compute_logp/" in name}
    assert replayed == {name: value for name, value in recorded.items() if name not in of_rows}
    assert len(replayed) > 30
    ours, theirs = (
        tensors(folder.resolve() / "checkpoints" / "recover" / "step_000003") for folder in (replayed_run(out), run)
    )
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert np.array_equal(value, theirs[key]), key
    lines = [line.split() for line in shown.splitlines() if line.startswith("ppo_")]
    assert {line[0] for line in lines} == replayed.keys()
    assert {line[-1] for line in lines} == {"0"}
    (counts,) = of_step(run, 2)
    trained = counts["ppo_actor/n_seqs"] * (1 - counts["ppo_actor/no_eos_ratios/avg"] * (name == "recomputed"))
    assert 0 < trained <= 8


def test_changed_settings_change_the_loss(runs, tmp_path, capsys):
    run, out = runs("decoupled"), tmp_path / "out"
    capsys.readouterr()
    settings = ("actor.eps_clip=1000", "actor.optimizer.lr=0.002", "actor.kl_loss_coef=0.5")
    assert replay(run, "--updates", 2, "--out", out, *settings) == 0
    shown = capsys.readouterr().out
    assert "changed: actor.eps_clip=1000" in shown
    assert "advantages: as recorded" in shown
    recorded, replayed = update_of(run), update_of(replayed_run(out))
    assert replayed["ppo_actor/update/lr"] == pytest.approx(0.002)
    assert recorded["ppo_actor/update/clip_fraction"] > 0 == replayed["ppo_actor/update/clip_fraction"]
    expected = replayed["ppo_actor/update/policy_loss"] + 0.5 * replayed["ppo_actor/update/kl_loss"]
    assert replayed["ppo_actor/update/loss"] == pytest.approx(expected, rel=1e-4)


def test_advantages_follow_changed_reward_settings(runs, tmp_path, capsys):
    run, out = runs("critic"), tmp_path / "out"
    capsys.readouterr()
    assert replay(run, "--out", out, "actor.reward_norm=null", "actor.reward_scaling=2", "actor.gae_lambda=1") == 0
    assert "computed from the recorded rewards" in capsys.readouterr().out
    arrays = load_file(run / "rollouts" / "step_000002.safetensors")
    (record,) = of_step(replayed_run(out), 2)
    assert record["ppo_actor/task_reward/avg"] == pytest.approx(arrays["reward"].mean(), rel=1e-6)
    assert record["ppo_actor/final_reward/avg"] == pytest.approx(2 * arrays["reward"].mean(), rel=1e-6)


def test_recorded_samples_and_the_initial_model_are_used_if_nothing_was_saved(runs, tmp_path, tiny_checkpoint, capsys):
    run = run_kind("rl", tiny_checkpoint, tmp_path / "plain", {}).folder
    capsys.readouterr()
    assert main(["replay", str(run), "--step", "0"]) == 0
    shown = capsys.readouterr().out
    samples = of_step(run, 0, "samples.jsonl")
    assert f"{len(samples)} rows (only the recorded samples" in shown
    assert f"{tiny_checkpoint}, the initial model (the starting weights of the step)" in shown
    assert main(["replay", str(run), "--step", "0", "actor.reward_norm=null"]) == 2
    assert "only some samples were recorded" in capsys.readouterr().err


def test_an_experiment_on_a_data_set_is_refused(tmp_path, tiny_checkpoint, capsys):
    run = run_kind("sft", tiny_checkpoint, tmp_path, {}).folder
    assert main(["replay", str(run), "--step", "0"]) == 2
    assert "has no rollout, so there are no samples to replay" in capsys.readouterr().err


def test_the_error_names_a_wrong_setting(runs, capsys):
    capsys.readouterr()
    assert replay(runs("critic"), "actor.eps_clipp=1") == 2
    assert "actor.eps_clipp" in capsys.readouterr().err


def test_a_replay_of_an_experiment_with_evaluations_does_not_evaluate(tmp_path, tiny_checkpoint):
    evaluated = {
        "valid_dataset": {"path": str(tmp_path / "rl.jsonl"), "type": "rl", "batch_size": 4},
        "evaluator": {"freq_steps": 5, "eval_before_train": True, "keep_best": True, "early_stop_patience": 3},
        "eval_gconfig.temperature": 0.5,
    }
    config = settings_of_kind("rl", tiny_checkpoint, tmp_path, evaluated)
    save_config(config, tmp_path / "run")
    recorded, replayed = replay_config(tmp_path / "run", [], tmp_path / "out", keeps=False)
    assert recorded.evaluator.freq_steps == 5
    assert (replayed.valid_dataset, replayed.eval_gconfig) == (None, None)
    assert not replayed.evaluator.has_frequency


def test_a_replay_reports_to_no_tracking_service(runs, tmp_path):
    folder = runs("critic")
    tracked = [f"stats_logger.{service}.mode={mode}" for service, mode in TRACKED.items()]
    _, config = replay_config(folder, tracked, tmp_path / "out", keeps=False)
    assert {service: getattr(config.stats_logger, service).mode for service in TRACKED} == dict.fromkeys(
        TRACKED, "disabled"
    )
