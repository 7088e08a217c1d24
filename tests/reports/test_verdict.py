"""The verdict on runs that were prepared to fail in known ways, and on healthy runs."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass

import numpy as np
import pytest

from areno.reports.run_data import RunData
from areno.reports.trends import trend_of
from areno.reports.verdict import verdict_of
from areno.storage.metric_columns import Series
from areno.storage.run_lock import run_lock
from tests.reports.prepared import FINISHED, OPTIONS, SETTINGS, Prepared, curve, policy_metrics, prompt_samples, sample

STEPS = 100
FAILED = {**FINISHED, "state": "failed"}


def rng_of(seed=0):
    return np.random.default_rng(seed)


def flat(rng, value=0.3):
    return curve(rng, STEPS, value, value)


@dataclass
class Expected:
    """What the verdict must say: ``cause`` is the first problem (empty: the ending itself), ``change`` is in its remedy."""

    learned: str
    cause: str
    change: str
    ended: str = "finished"
    samples: bool = True


def no_reward():
    zeros = np.zeros(STEPS)
    names = ("rewards_mean", "rewards_std", "rewards_min", "rewards_max")
    metrics = policy_metrics(rng_of(), STEPS, **{f"rollout/{name}": zeros for name in names[1:]}, reward=zeros)
    metrics["train/zero_std_groups"] = np.ones(STEPS)
    metrics["train/grad_norm"] = zeros
    samples = [
        sample(step, prompt, 0, 0.0, picked=["first", "best", "worst"]) for step in range(STEPS) for prompt in range(4)
    ]
    return Prepared(metrics, samples=samples), Expected("no", "equal_rewards", "--reward-fn-path")


def all_truncated():
    rng = rng_of()
    lengths = {"rollout/response_len_mean": np.minimum(curve(rng, STEPS, 90, 400, 5), 256)}
    truncated = {"train/truncated_ratio": np.clip(np.linspace(0, 1.6, STEPS), 0, 1)}
    samples = [
        sample(step, 0, number, 0.0, finish_reason="length" if step > 60 else "stop", response_len=256)
        for step in range(STEPS)
        for number in range(2)
    ]
    run = Prepared(policy_metrics(rng, STEPS, reward=flat(rng), **lengths, **truncated), samples=samples)
    return run, Expected("no", "truncated", "--max-new-tokens 512 (now 256)")


def not_a_number():
    rng = rng_of()
    metrics = policy_metrics(rng, STEPS, reward=flat(rng))
    metrics["train/loss"][95:] = np.nan
    metrics["train/grad_norm"][95:] = np.nan
    metrics["train/update_skipped"][95:] = 1
    status = {**FAILED, "error": "EngineError: the gradient was not finite in 5 updates in a row"}
    run = Prepared(metrics, status=status)
    return run, Expected("no", "non_finite", "before step 95 with a lower learning rate, --lr 0.0003", "failed", False)


def exploding_gradients():
    rng = rng_of()
    reward = np.concatenate([curve(rng, 60, 0.2, 0.8), curve(rng, 40, 0.05, 0.02)])
    norms = np.concatenate([curve(rng, 55, 0.5, 0.5, 0.05), curve(rng, 45, 30, 90, 5)])
    metrics = policy_metrics(rng, STEPS, reward=reward, **{"train/grad_norm": norms})
    return Prepared(metrics, samples=prompt_samples(rng, STEPS)), Expected(
        "lost", "exploding", "--lr 0.0003", samples=False
    )


def entropy_collapse():
    rng = rng_of()
    metrics = policy_metrics(
        rng,
        STEPS,
        reward=0.2 + 0.2 * (1 - np.exp(-np.arange(STEPS) / 15)) + rng.normal(0, 0.02, STEPS),
        **{
            "train/entropy": 1.2 * np.exp(-np.arange(STEPS) / 12) + 0.01,
            "train/zero_std_groups": np.linspace(0.2, 0.95, STEPS),
        },
    )
    return Prepared(metrics, samples=prompt_samples(rng, STEPS)), Expected("yes", "entropy_collapse", "--kl-coef 0.01")


def one_part_at_the_cost_of_another():
    rng = rng_of()
    metrics = policy_metrics(rng, STEPS)
    metrics["rollout/reward_parts/answer"] = curve(rng, STEPS, 0.5, 0.1)
    metrics["rollout/reward_parts/length"] = curve(rng, STEPS, 0.1, 1.0)

    def parts(step, prompt):
        hacked = step > 50 and prompt == 2
        return {"reward_parts": {"length": 1.0 if hacked else 0.3, "answer": 0.0 if hacked else 0.6}}

    run = Prepared(metrics, samples=prompt_samples(rng, STEPS, parts))
    return run, Expected("exploited", "opposed_parts", "--reward-weights answer=")


def better_in_training_only():
    rng = rng_of()
    scores = np.linspace(0.5, 0.15, 5)
    evaluations = {
        20 * index: {"eval/rewards_mean": score, "eval/rewards_std": 0.4, "eval/num_samples": 200}
        for index, score in enumerate(scores)
    }
    run = Prepared(policy_metrics(rng, STEPS), evaluations=evaluations, samples=prompt_samples(rng, STEPS))
    return run, Expected("worse", "against_evaluation", "--keep-best")


def repetition():
    rng = rng_of()

    def answers(step, prompt):
        return {"completion": "therefore yes, " * 40} if step > 40 else {}

    run = Prepared(policy_metrics(rng, STEPS), samples=prompt_samples(rng, STEPS, answers))
    return run, Expected("exploited", "repetitive", "repetition")


def one_answer_to_everything():
    rng = rng_of()
    answer = "As a careful assistant I have checked each step, and the result is certainly right."

    def answers(step, prompt):
        return {"completion": answer} if step > 40 else {}

    run = Prepared(policy_metrics(rng, STEPS), samples=prompt_samples(rng, STEPS, answers))
    return run, Expected("exploited", "identical", "depend on the prompt")


def memorized():
    rng = rng_of()
    metrics = {
        "train/loss": 2 * np.exp(-np.arange(STEPS) / 30) + rng.normal(0, 0.02, STEPS),
        "train/grad_norm": np.ones(STEPS),
    }
    losses = {0: 2.1, 20: 1.4, 40: 1.3, 60: 1.5, 80: 1.8, 100: 2.0}
    evaluations = {step: {"eval/loss": loss, "eval/num_sequences": 100} for step, loss in losses.items()}
    run = Prepared(metrics, {**OPTIONS, "algo": "sft", "epochs": 20}, evaluations)
    return run, Expected("memorized", "memorized", "--epochs, now 20", samples=False)


def killed():
    rng = rng_of()
    run = Prepared(
        policy_metrics(rng, STEPS, reward=curve(rng, STEPS, 0.2, 0.8)), status={**FINISHED, "state": "running"}
    )
    return run, Expected("yes", "", "memory ran out", "killed", False)


def broken_reward_function():
    error = "RewardError: reward function reward.py failed on record 2: TypeError: unsupported operand"
    return Prepared({}, status={**FAILED, "error": error}), Expected(
        "unknown", "", "First fix the cause of the error", "failed", False
    )


def learning_rate_too_low():
    rng = rng_of()
    metrics = policy_metrics(rng, STEPS, reward=flat(rng), **{"train/entropy": curve(rng, STEPS, 1.2, 1.2, 0.02)})
    run = Prepared(metrics, {**OPTIONS, "lr": 1e-8}, samples=prompt_samples(rng, STEPS))
    return run, Expected("no", "no_progress", "--lr 1e-07 (now 1e-08)", samples=False)


def mismatched_logprobs():
    rng = rng_of()
    metrics = policy_metrics(rng, STEPS, reward=flat(rng), **{"train/logp_abs_diff_mean": np.full(STEPS, 0.2)})
    return Prepared(metrics), Expected("no", "logprob_gap", "--dtype float32", samples=False)


def ever_shorter():
    rng = rng_of()
    metrics = policy_metrics(rng, STEPS, **{"rollout/response_len_mean": np.maximum(curve(rng, STEPS, 90, -20, 2), 2)})
    return Prepared(metrics, samples=prompt_samples(rng, STEPS)), Expected(
        "yes", "length_collapse", "short or empty answers"
    )


def stale_samples():
    rng = rng_of()
    metrics = policy_metrics(rng, STEPS, reward=flat(rng)) | {"train/staleness_mean": np.full(STEPS, 9.0)}
    run = Prepared(metrics, {**OPTIONS, "max_staleness": 10})
    return run, Expected("no", "stale", "--max-staleness to 1 (now 10)", samples=False)


def too_hard_in_an_experiment():
    rng = rng_of()
    metrics = {
        "rollout/reward/avg": np.full(STEPS, 0.01) + rng.normal(0, 0.004, STEPS),
        "rollout/reward/min": np.zeros(STEPS),
        "rollout/reward/max": np.ones(STEPS),
        "ppo_actor/update/grad_norm": np.full(STEPS, 0.01),
    }
    samples = []
    for step in range(STEPS):
        samples += [sample(step, prompt, 0, 0.0, picked=["first", "best", "worst"]) for prompt in range(7)]
        samples += [sample(step, 7, 0, 0.0, picked=["first", "worst"]), sample(step, 7, 1, 1.0, picked=["best"])]
    return Prepared(metrics, SETTINGS, samples=samples), Expected("no", "tied_groups", "gconfig.n_samples=8 (now 4)")


def destroyed_at_once():
    """What a learning rate of 0.02 did to a real run."""
    rng = rng_of()
    reward, most = np.zeros(STEPS), np.zeros(STEPS)
    reward[0], most[0] = 0.305, 1.0
    metrics = policy_metrics(rng, STEPS, reward=reward, **{"rollout/rewards_max": most, "train/grad_norm": reward})
    metrics["rollout/num_sequences"] = np.full(STEPS, 128.0)
    metrics["train/zero_std_groups"], metrics["train/truncated_ratio"] = most * 0 + 1, np.full(STEPS, 0.7)
    return Prepared(metrics, samples=prompt_samples(rng, STEPS)), Expected("worse", "collapsed", "--lr 0.0001")


def destroyed_after_a_step_without_rewards():
    """Statistics of the first step are not numbers."""
    prepared, expected = destroyed_at_once()
    metrics = {name: np.concatenate([values[:1], values]) for name, values in prepared.metrics.items()}
    for name, values in metrics.items():
        if name.startswith("rollout/rewards_"):
            values[0] = np.nan
    prepared.metrics = metrics
    return prepared, expected


RUNS = [
    *(no_reward, all_truncated, not_a_number, exploding_gradients, entropy_collapse, one_part_at_the_cost_of_another),
    *(better_in_training_only, repetition, one_answer_to_everything, memorized, killed, broken_reward_function),
    *(
        learning_rate_too_low,
        mismatched_logprobs,
        ever_shorter,
        stale_samples,
        too_hard_in_an_experiment,
        destroyed_at_once,
        destroyed_after_a_step_without_rewards,
    ),
]


@pytest.mark.parametrize("prepare", RUNS, ids=lambda prepare: prepare.__name__)
def test_the_verdict_names_the_cause_of_a_failure_and_a_remedy(prepare, tmp_path):
    prepared, expected = prepare()
    run = RunData(prepared.write(tmp_path / "run").path)
    verdict = verdict_of(run)
    assert (verdict.learned.state, verdict.ending.state) == (expected.learned, expected.ended), verdict
    causes = [problem.key for problem in verdict.problems]
    if expected.cause:
        assert causes[0] == expected.cause, verdict.problems
        assert expected.change in verdict.problems[0].remedy
        named = verdict.problems[0].samples
    else:
        assert causes == []
        assert expected.change in verdict.ending.remedy
        named = ()
    assert bool(named) == expected.samples
    recorded = {(r["step"], r["prompt_index"], r["sample_index"]) for r in map(json.loads, samples_of(run))}
    assert {tuple(map(int, name.split("/"))) for name in named} <= recorded


@pytest.mark.parametrize(
    ("changes", "key", "remedy"),
    [
        ({"train/reward_errors": np.full(STEPS, 8.0)}, "reward_errors", "--on-reward-error stop"),
        ({"train/grad_norm": np.zeros(STEPS)}, "zero_gradient", "loss mask"),
        ({"train/clip_fraction": np.full(STEPS, 0.6)}, "clipped", "--update-epochs 1"),
        ({"rollout/response_len_mean": np.linspace(50, 250, STEPS)}, "length_explosion", "length penalty"),
        ({"train/entropy": np.linspace(0.5, 3.0, STEPS)}, "entropy_explosion", "--kl-coef 0.01"),
    ],
)
def test_one_bad_metric_is_reported_as_a_problem(changes, key, remedy, tmp_path):
    rng = rng_of()
    metrics = policy_metrics(rng, STEPS, reward=flat(rng), **changes)
    problems = verdict_of(RunData(Prepared(metrics).write(tmp_path / "run").path)).problems
    assert [problem.key for problem in problems] == [key]
    assert remedy in problems[0].remedy


def test_failed_episodes_and_a_diverging_loss_are_named(tmp_path):
    rng = rng_of()
    counts = {"rollout/accepted": np.arange(STEPS) * 8.0 + 8, "rollout/failed": np.arange(STEPS) * 8.0}
    run = Prepared({"rollout/reward/avg": flat(rng), **counts}, SETTINGS).write(tmp_path / "episodes")
    assert [problem.key for problem in verdict_of(RunData(run.path)).problems] == ["episodes_failed"]
    run = Prepared({"train/loss": curve(rng, STEPS, 1.0, 9.0)}, {**OPTIONS, "algo": "sft"}).write(tmp_path / "loss")
    verdict = verdict_of(RunData(run.path))
    assert verdict.learned.state == "worse"
    assert [problem.key for problem in verdict.problems] == ["diverged"]
    assert "--lr 0.0001" in verdict.problems[0].remedy


def samples_of(run):
    return run.files.samples_path.read_text().splitlines()


def test_the_named_samples_are_those_with_the_problem(tmp_path):
    prepared, _ = one_part_at_the_cost_of_another()
    (problem,) = verdict_of(RunData(prepared.write(tmp_path / "parts").path)).problems
    assert all(name.split("/")[1:] == ["2", "1"] and int(name.split("/")[0]) > 50 for name in problem.samples)
    prepared, _ = repetition()
    problem = verdict_of(RunData(prepared.write(tmp_path / "repetition").path)).problems[0]
    assert all(int(name.split("/")[0]) >= 90 and name.endswith("/1") for name in problem.samples)
    prepared, _ = all_truncated()
    problem = verdict_of(RunData(prepared.write(tmp_path / "truncated").path)).problems[0]
    assert all(int(name.split("/")[0]) >= 90 for name in problem.samples)


def test_consequences_of_an_exploited_reward_are_not_listed_as_problems(tmp_path):
    """As in a real run: the exploit reaches the highest reward, so that all rewards are equal and the gradient is zero."""
    rng = rng_of()
    late = np.arange(STEPS) > 40
    columns = {
        "rollout/rewards_min": late * 1.0,
        "train/zero_std_groups": np.where(late, 1.0, 0.2),
        "train/truncated_ratio": np.where(late, 1.0, 0.05),
        "train/grad_norm": np.where(late, 0.0, 0.5),
    }
    metrics = policy_metrics(rng, STEPS, reward=np.where(late, 1.0, 0.3), **columns)
    prepared, _ = repetition()
    prepared.metrics = metrics
    verdict = verdict_of(RunData(prepared.write(tmp_path / "run").path))
    assert verdict.learned.state == "exploited"
    assert [problem.key for problem in verdict.problems] == ["repetitive"]
    assert "are the same text for different prompts" in verdict.problems[0].text


@pytest.mark.parametrize("seed", range(10))
def test_a_healthy_run_has_learned_and_has_no_problems(seed, tmp_path):
    rng = rng_of(seed)
    scores = np.linspace(0.2, 0.75, 5)
    evaluations = {
        20 * index: {"eval/rewards_mean": score, "eval/rewards_std": 0.4, "eval/num_samples": 100}
        for index, score in enumerate(scores)
    }
    run = Prepared(policy_metrics(rng, STEPS), evaluations=evaluations, samples=prompt_samples(rng, STEPS))
    verdict = verdict_of(RunData(run.write(tmp_path / "run").path))
    assert (verdict.learned.state, verdict.problems) == ("yes", ())
    assert "The run finished: 100 steps, 1 epoch" in verdict.ending.text
    assert "from 0.2 to 0.75" in verdict.learned.text


@pytest.mark.parametrize("steps", [8, 12, 40, 400])
def test_noise_is_not_mistaken_for_learning(steps):
    """A threshold of three standard errors is wrong in one run of 370, so in fewer than five of 500."""
    wrong = 0
    for seed in range(500):
        trend = trend_of(Series(array("q", range(steps)), array("d", rng_of(seed).normal(0.5, 0.2, steps))))
        wrong += trend.rises or trend.falls
    assert wrong < 5


@pytest.mark.parametrize("noise", [0.02, 0.1])
@pytest.mark.parametrize("steps", [20, 100, 1000])
def test_learning_is_detected_despite_noise(noise, steps, tmp_path):
    run = Prepared({"rollout/rewards_mean": curve(rng_of(), steps, 0.3, 0.7, noise)})
    assert verdict_of(RunData(run.write(tmp_path / "run").path)).learned.state == "yes"


def test_few_steps_give_no_verdict(tmp_path):
    run = Prepared({"rollout/rewards_mean": [0.1, 0.9, 0.2]})
    learned = verdict_of(RunData(run.write(tmp_path / "run").path)).learned
    assert (learned.state, "too few steps" in learned.text) == ("unknown", True)


def test_a_solved_task_is_not_a_failure(tmp_path):
    rng = rng_of()
    reward = np.minimum(np.linspace(0.2, 2.5, STEPS), 1)
    metrics = policy_metrics(rng, STEPS, reward=reward, **{"rollout/rewards_min": np.where(reward < 1, 0, 1.0)})
    verdict = verdict_of(RunData(Prepared(metrics).write(tmp_path / "run").path))
    assert verdict.learned.state == "yes"
    assert [problem.key for problem in verdict.problems] == ["solved"]
    assert "harder problems" in verdict.problems[0].remedy


def test_dpo_is_judged_by_its_preference_accuracy(tmp_path):
    rng = rng_of()
    metrics = {
        "train/loss": curve(rng, STEPS, 0.69, 0.3, 0.01),
        "train/dpo_accuracy": np.clip(curve(rng, STEPS, 0.5, 0.9), 0, 1),
        "train/dpo_chosen_reward": curve(rng, STEPS, 0, -4, 0.1),
    }
    verdict = verdict_of(RunData(Prepared(metrics, {**OPTIONS, "algo": "dpo"}).write(tmp_path / "run").path))
    assert verdict.learned.state == "yes"
    assert "The model prefers the chosen answer" in verdict.learned.text
    assert [problem.key for problem in verdict.problems] == ["displaced"]


ENDS = [
    ({"max_steps": STEPS}, {}, FINISHED, "all 100 steps of --max-steps 100 are done"),
    ({"epochs": 3}, {"epochs": 3}, FINISHED, "The run finished: 100 steps, 3 epochs"),
    ({"epochs": 3, "max_sequences": 3200}, {"epochs": 1}, FINISHED, "the limit of 3,200 trained sequences was reached"),
    ({}, {}, {**FINISHED, "state": "stopped", "signal": "SIGINT"}, "stopped by Ctrl-C (SIGINT) after 100 steps"),
    ({}, {}, {**FINISHED, "state": "stopped", "signal": "SIGTERM"}, "stopped by SIGTERM (from a scheduler"),
    ({}, {}, None, "the run recorded no status"),
    ({}, {"steps": STEPS}, None, "The run finished"),
]


@pytest.mark.parametrize(("changes", "summary", "status", "text"), ENDS)
def test_the_end_of_a_run_is_explained(changes, summary, status, text, tmp_path):
    run = Prepared(policy_metrics(rng_of(), STEPS), {**OPTIONS, **changes}, status=status, summary=summary)
    ending = verdict_of(RunData(run.write(tmp_path / "run").path)).ending
    assert text in ending.text
    assert ("--save-interval writes a checkpoint earlier" in ending.remedy) == (ending.state == "stopped")
    assert "--resume" not in ending.remedy


def test_an_early_stop_is_named(tmp_path):
    scores = [0.2, 0.6, 0.5, 0.55, 0.4]
    evaluations = {20 * index: {"eval/rewards_mean": score} for index, score in enumerate(scores)}
    config = {**OPTIONS, "early_stop_patience": 3, "max_steps": 1000}
    run = Prepared(policy_metrics(rng_of(), STEPS), config, evaluations)
    ending = verdict_of(RunData(run.write(tmp_path / "run").path)).ending
    assert "the last 3 evaluations did not improve on the best (--early-stop-patience 3)" in ending.text


def test_a_run_in_progress_has_not_ended(tmp_path):
    run = Prepared(policy_metrics(rng_of(), STEPS), status={**FINISHED, "state": "running"}).write(tmp_path / "run")
    run.log_path.write_text("INFO areno.observability.display: step 100/400 reward=0.8 0.1 s/step\n")
    with run_lock(run.path, "no"):
        ending = verdict_of(RunData(run.path)).ending
    assert (ending.state, ending.remedy) == ("running", "")
    assert "after 100 steps of 400" in ending.text
    assert "min old" in ending.text  # the last record is from 2025
    assert verdict_of(RunData(run.path)).ending.state == "killed"


def test_running_out_of_memory_has_its_own_remedy(tmp_path):
    status = {**FAILED, "error": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"}
    run = Prepared(policy_metrics(rng_of(), STEPS), status=status).write(tmp_path / "run")
    assert "lower --mini-bs first" in verdict_of(RunData(run.path)).ending.remedy


def test_a_run_without_records_is_not_an_error(tmp_path):
    verdict = verdict_of(RunData(Prepared({}, status=None).write(tmp_path / "run").path))
    assert (verdict.learned.state, verdict.ending.state, verdict.problems) == ("unknown", "", ())
