"""Conditions under which a problem is reported, and similar conditions that are no problem."""

from __future__ import annotations

import numpy as np
import pytest

from areno.observability.health import LOGPROB_GAP_LIMIT, LOGPROB_GAP_LIMIT_FP32, HealthMonitor
from areno.reports.run_data import RunData
from areno.reports.verdict import verdict_of
from tests.reports.prepared import Prepared, curve, policy_metrics, sample

STEPS = 100


def rng_of(seed=0):
    return np.random.default_rng(seed)


def flat(rng, value=0.3):
    return curve(rng, STEPS, value, value)


def test_an_update_without_any_gradient_is_not_called_non_finite(tmp_path):
    """As the engine records a step in which all rows are masked: the norm is 0, and the update is skipped."""
    metrics = policy_metrics(rng_of(), STEPS, reward=flat(rng_of()))
    metrics["train/update_skipped"][40:43], metrics["train/grad_norm"][40:43] = 1, 0
    problems = verdict_of(RunData(Prepared(metrics).write(tmp_path / "run").path)).problems
    assert "non_finite" not in [problem.key for problem in problems]


@pytest.mark.parametrize(
    ("gaps", "limit", "reported"),
    [
        (np.where(np.arange(STEPS) < 5, 0.2, 1e-4), LOGPROB_GAP_LIMIT, False),
        (None, LOGPROB_GAP_LIMIT, False),
        (np.full(STEPS, 0.004), LOGPROB_GAP_LIMIT_FP32, True),
    ],
)
def test_a_log_prob_gap_is_a_problem_only_while_it_exceeds_the_limit_of_the_run(gaps, limit, reported, tmp_path):
    metrics = policy_metrics(rng_of(), STEPS, reward=flat(rng_of()))
    recorded = metrics.pop("train/logp_abs_diff_mean")
    metrics |= {} if gaps is None else {"train/logp_abs_diff_mean": gaps}
    run = Prepared(metrics).write(tmp_path / "run")
    (warning,) = HealthMonitor(logprob_gap_limit=limit).observe(0, {"logp_abs_diff_mean": 200 * recorded[0]})
    run.append_warning(0, warning)
    keys = [problem.key for problem in verdict_of(RunData(run.path)).problems]
    assert ("logprob_gap" in keys) == reported


def test_answers_that_always_have_one_token_did_not_get_shorter(tmp_path):
    reward = np.minimum(np.linspace(0.2, 2.5, STEPS), 1)
    columns = {"rollout/rewards_min": np.where(reward < 1, 0, 1.0), "rollout/response_len_mean": np.ones(STEPS)}
    run = Prepared(policy_metrics(rng_of(), STEPS, reward=reward, **columns)).write(tmp_path / "run")
    assert [problem.key for problem in verdict_of(RunData(run.path)).problems] == ["solved"]


@pytest.mark.parametrize("first", [3.0, 60.0])
def test_answers_that_shrink_to_one_token_are_reported(first, tmp_path):
    lengths = np.where(np.arange(STEPS) < 30, first, 1.0)
    metrics = policy_metrics(rng_of(), STEPS, reward=flat(rng_of()), **{"rollout/response_len_mean": lengths})
    problems = verdict_of(RunData(Prepared(metrics).write(tmp_path / "run").path)).problems
    assert "length_collapse" in [problem.key for problem in problems]


def test_rewards_that_are_equal_within_each_step_only_are_not_called_all_equal(tmp_path):
    """One prompt per step, whose answers are all right or all wrong."""
    reward = rng_of().integers(0, 2, STEPS).astype(float)
    bounds = {"rollout/rewards_min": reward, "rollout/rewards_max": reward, "rollout/rewards_std": reward * 0}
    metrics = policy_metrics(rng_of(), STEPS, reward=reward, **bounds, **{"train/zero_std_groups": np.ones(STEPS)})
    samples = [sample(step, 0, number, score) for step, score in enumerate(reward) for number in range(4)]
    problems = verdict_of(RunData(Prepared(metrics, samples=samples).write(tmp_path / "run").path)).problems
    assert [problem.key for problem in problems] == ["tied_groups"]


def test_the_usual_reward_is_named_even_if_the_last_step_differs(tmp_path):
    zeros, last = np.zeros(STEPS), np.eye(STEPS)[-1]
    bounds = {"rollout/rewards_min": zeros, "rollout/rewards_max": last, "rollout/rewards_std": last / 4}
    metrics = policy_metrics(rng_of(), STEPS, reward=last / 16, **bounds)
    problem = verdict_of(RunData(Prepared(metrics).write(tmp_path / "run").path)).problems[0]
    assert problem.key == "equal_rewards"
    assert "rewards are 0, " in problem.text
