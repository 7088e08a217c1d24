"""Options of the policy algorithms in whole runs of ``areno train``: several passes, estimators, references, reward models."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from areno.cli.main import main
from tests.e2e.test_resume import metrics
from tests.support.cli import task_arguments, without_times, write_task
from tests.support.loops import equal, save_classifier
from tests.support.optimizer_states import contents


@pytest.fixture
def run(tmp_path, tiny_checkpoint, capsys):
    """Runs ``areno train`` in this process; returns the run directory."""
    task = write_task(tmp_path / "task")

    def train(algo, name, *further, model_rewards=False):
        arguments = task_arguments(algo, tiny_checkpoint, task, tmp_path / name)
        if model_rewards:
            place = arguments.index("--reward-fn-path")
            del arguments[place : place + 2]
        else:
            arguments += ["--reward-workers", 1]
        code = main([str(part) for part in (*arguments, *further)])
        assert code == 0, capsys.readouterr().err
        return tmp_path / name

    return train


def final_weights(run_dir):
    return load_file(max((run_dir / "checkpoints").glob("step_*")) / "model.safetensors")


PASSES = ("--update-epochs", 2, "--update-minibatches", 3)


@pytest.mark.parametrize("algo", ["gspo", pytest.param("grpo", marks=pytest.mark.long), "ppo"])
def test_several_passes_make_several_optimizer_steps_that_clip(algo, run):
    extra = ("--critic-warmup-steps", 0, "--clip-eps", 0.01) if algo == "ppo" else (f"--{algo}-clip-eps", 1e-3)
    run_dir = run(algo, "run", *PASSES, *extra, "--max-steps", 2)
    records = metrics(run_dir)
    clipped = "train/pg_clipfrac" if algo == "ppo" else "train/clip_fraction"
    for record in records:
        assert record[clipped] > 0.05
        assert record["train/ratio_std"] > 1e-4
        # The difference from the rollout is measured in the first of six calls, before the policy has moved.
        assert record["train/logp_abs_diff_mean"] < 1e-5
    state = max((run_dir / "checkpoints").iterdir()) / "trainer_state"
    assert contents(state / "optimizer")["head"]["steps"] == 12
    if algo == "ppo":
        assert contents(state / "critic_optimizer")["head"]["steps"] == 12


@pytest.mark.long
def test_passes_with_a_reference_resume_bit_for_bit(run):
    options = (*PASSES, "--kl-coef", 0.1, "--temperature", 0.8, "--save-interval", 3, "--advantage", "group_mean")
    whole = run("gspo", "whole", *options, "--max-steps", 6)
    halves = run("gspo", "halves", *options, "--max-steps", 3)
    assert main(["train", "--resume", str(halves), "--max-steps", "6"]) == 0
    assert [without_times(record) for record in metrics(whole)] == [without_times(r) for r in metrics(halves)]
    assert equal(final_weights(whole), final_weights(halves))
    assert all(record["train/kl_loss"] > 0 for record in metrics(whole))


@torch.inference_mode()
def distance(run_dir, checkpoint):
    """KL(trained || start) of the next token after a few prompts, computed with plain ``transformers``."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    trained = AutoModelForCausalLM.from_pretrained(max((run_dir / "checkpoints").iterdir()), dtype=torch.float64)
    started = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    total = 0.0
    for number in range(20):
        ids = tokenizer(f"What is {number} plus 3? The answer", return_tensors="pt")["input_ids"]
        p, q = (model(input_ids=ids).logits.log_softmax(-1) for model in (trained, started))
        total += float((p.exp() * (p - q)).sum(-1).mean())
    return total / 20


@pytest.mark.parametrize("algo", [pytest.param("grpo", marks=pytest.mark.long), "gspo"])
def test_a_kl_term_keeps_the_policy_near_the_reference(algo, run, tiny_checkpoint):
    options = ("--max-steps", 7, "--update-epochs", 2)
    free = run(algo, "free", *options)
    held = run(algo, "held", *options, "--kl-coef", 10, "--kl-loss-type", "k2")
    assert distance(held, tiny_checkpoint) < 0.5 * distance(free, tiny_checkpoint)
    assert all(record["train/kl_coef"] == 10 for record in metrics(held))


def test_the_estimator_changes_what_is_learned(run):
    weights = [final_weights(run("grpo", name, "--advantage", name, "--max-steps", 2)) for name in ("group", "rloo")]
    assert not equal(*weights)


def test_a_reward_model_rewards_and_evaluates_a_run(run, tmp_path, tiny_checkpoint, capsys):
    judge = save_classifier(tmp_path / "judge", tiny_checkpoint)
    rows = [{"prompt": f"What is {a} plus {a}?"} for a in range(12)]
    (tmp_path / "held_out.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ("--reward-ckpt", judge, "--max-steps", 4, "--critic-warmup-steps", 1)
    evaluation = ("--eval-dataset-path", tmp_path / "held_out.jsonl", "--eval-interval", 2)
    plain = run("ppo", "plain", *options, model_rewards=True)
    evaluated = run("ppo", "evaluated", *options, *evaluation, model_rewards=True)
    assert "role=reward stage=score_start rows=24" in (evaluated / "log.txt").read_text()
    steps = [record for record in metrics(evaluated) if "train/reward_mean" in record]
    for record in steps:
        assert record["train/reward_model_raw_reward_mean"] == pytest.approx(record["rollout/rewards_mean"])
    evaluations = {record["step"]: record for record in metrics(evaluated) if "eval/rewards_mean" in record}
    assert len(evaluations) == 3
    assert all(record["eval/num_prompts"] == 12 for record in evaluations.values())
    # Evaluation does not affect training.
    assert equal(final_weights(plain), final_weights(evaluated))
