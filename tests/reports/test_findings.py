"""The verdict beyond the optimized number: reward parts, held-out data, truncation, collapse, and saved models."""

from __future__ import annotations

import numpy as np
import pytest

from areno.reports.advice import OptionAdvice
from areno.reports.checkpoints import kept
from areno.reports.run_data import RunData
from areno.reports.verdict import verdict_of
from areno.storage.contents import STATE_FILE, STATE_FOLDER
from tests.reports.prepared import FINISHED, OPTIONS, SETTINGS, Prepared, curve, policy_metrics, prompt_samples, sample

SEEDS = range(4)


def verdict(run, path):
    return verdict_of(RunData(run.write(path / "run").path))


def keys(result):
    return [problem.key for problem in result.problems]


def with_parts(rng, steps, columns, config=None, scale=1.0):
    """A run with reward parts whose reward rises; the parts of a sample are equal, so that no sample decides."""
    metrics = policy_metrics(rng, steps, reward=scale * curve(rng, steps, 0.3, 1.0))
    metrics |= {f"rollout/reward_parts/{name}": column for name, column in columns.items()}
    metrics["rollout/rewards_max"] = np.full(steps, scale)

    def parts(step, prompt):
        return {"reward_parts": {name: float(prompt == 0) for name in columns}}

    samples = prompt_samples(rng, steps, parts)
    return Prepared(metrics, {**OPTIONS, **(config or {})}, samples=samples)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("steps", [40, 150, 500])
def test_losing_a_part_without_weight_in_the_first_steps_is_an_exploit(seed, steps, tmp_path):
    rng = np.random.default_rng(seed)
    exact = np.concatenate([[0.18, 0.12, 0.1, 0.06, 0.03], rng.binomial(1, 0.1, steps - 5) / 64])
    run = with_parts(rng, steps, {"form": curve(rng, steps, 0.3, 0.95), "exact": exact}, {"reward_weights": "exact=0"})
    run.metrics["train/zero_std_groups"] = np.linspace(0, 1.05, steps).clip(0, 1)
    result = verdict(run, tmp_path)
    assert (result.learned.state, keys(result)) == ("exploited", ["opposed_parts"])
    (problem,) = result.problems
    assert "`form` (weight 1, " in problem.text
    assert "`exact` (weight 0, " in problem.text
    assert "With weight 0, `exact` is recorded but not rewarded" in problem.text
    assert "give it a weight above 0 (--reward-weights exact=" in problem.remedy


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("steps", [30, 120, 400])
@pytest.mark.parametrize(
    "other",
    [
        lambda rng, steps: rng.binomial(128, 0.02, steps) / 128,  # rare, and constant
        lambda rng, steps: curve(rng, steps, 0.9, 0.8, 0.02),  # slightly lower, a fair price for a better answer
        lambda rng, steps: np.minimum(curve(rng, steps, -0.02, -0.3, 0.01), 0),  # a penalty for longer answers
    ],
)
def test_other_parts_of_a_healthy_run_are_not_opposed(other, steps, seed, tmp_path):
    rng = np.random.default_rng(seed)
    result = verdict(
        with_parts(rng, steps, {"answer": curve(rng, steps, 0.3, 0.9), "other": other(rng, steps)}), tmp_path
    )
    assert result.learned.state == "yes"
    assert "opposed_parts" not in keys(result)


def test_a_part_that_never_rises_keeps_the_task_from_being_solved(tmp_path):
    rng, steps = np.random.default_rng(0), 80
    run = with_parts(rng, steps, {"form": curve(rng, steps, 0.3, 1.0), "exact": curve(rng, steps, 0.1, 0.1, 0.01)})
    run.config["reward_weights"] = "exact=0,form=1"
    run.metrics["train/zero_std_groups"] = np.full(steps, 0.95)
    result = verdict(run, tmp_path)
    assert (result.learned.state, keys(result)) == ("partly", ["neglected"])
    assert "`exact` is only 0.0" in result.problems[0].text
    assert "solved" not in " ".join(result.lines())


def test_several_signs_of_one_exploit_are_one_finding(tmp_path):
    rng, steps = np.random.default_rng(0), 80
    late = np.arange(steps) > 30
    run = with_parts(rng, steps, {"steps": curve(rng, steps, 1, 9), "answer": np.where(late, 0.0, 0.4)}, scale=9.0)
    for record in run.samples:
        if record["step"] > 30 and record["picked"] == ["best"]:
            record.update(completion="carry the one, " * 40, finish_reason="length", reward=9.0)
    run.metrics |= {
        "train/truncated_ratio": late * 1.0,
        "train/zero_std_groups": late * 1.0,
        "train/entropy": np.where(late, 0.01, 1.0),
    }
    result = verdict(run, tmp_path)
    assert (result.learned.state, keys(result)) == ("exploited", ["opposed_parts"])
    (problem,) = result.problems
    assert "repeat themselves" in problem.text
    assert "the same text for different prompts" in problem.text
    assert "counting a repeated phrase only once" in problem.remedy
    assert "--max-new-tokens" not in " ".join(result.lines())


@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_repetition_that_is_not_rewarded_is_not_an_exploit(scale, tmp_path):
    rng, steps = np.random.default_rng(0), 60
    metrics = policy_metrics(rng, steps, reward=scale * curve(rng, steps, 0.5, 0.1, 0.02))
    metrics["rollout/rewards_max"] *= scale

    def answers(step, prompt):
        return {"completion": "3" * 80, "reward": 0.1 * scale} if step > 20 else {"reward": scale}

    result = verdict(Prepared(metrics, samples=prompt_samples(rng, steps, answers)), tmp_path)
    assert result.learned.state == "worse"
    assert keys(result) == ["collapse"]


def held_out(scores, steps, deviation=0.4, count=64):
    return {
        index * steps // (len(scores) - 1): {
            "eval/rewards_mean": score,
            "eval/rewards_std": deviation,
            "eval/num_samples": count,
        }
        for index, score in enumerate(scores)
    }


def on_prompts(samples, different):
    """The samples with this number of distinct prompts; marks the first answer to each prompt of a step."""
    for record in samples:
        record["prompt"] = f"What is {(4 * record['step'] + record['prompt_index']) % different} plus 7?"
        record["picked"] = sorted({*record["picked"], *(["first"] if record["sample_index"] == 0 else [])})
    return samples


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "scores", [[0.4, 0.36, 0.29, 0.28, 0.27, 0.28, 0.27], [0.3, 0.31, 0.28, 0.3, 0.33], [0.3, 0.5, 0.2]]
)
def test_a_rise_on_a_few_prompts_alone_is_memorization(scores, seed, tmp_path):
    rng = np.random.default_rng(seed)
    samples = on_prompts(prompt_samples(rng, 100), 12)
    result = verdict(
        Prepared(policy_metrics(rng, 100), evaluations=held_out(scores, 100, 0.2), samples=samples), tmp_path
    )
    assert (result.learned.state, keys(result)) == ("memorized", ["memorized"])
    assert (
        "Only 12 of 400 recorded prompts are distinct. The average number of times that the policy saw a prompt is at least "
        "33." in result.problems[0].text
    )
    assert "more and different prompts" in result.problems[0].remedy


def test_many_epochs_are_known_from_the_summary(tmp_path):
    rng = np.random.default_rng(0)
    evaluations, summary = held_out([0.3, 0.31, 0.28, 0.3], 100), {"epochs": 12}
    run = Prepared(policy_metrics(rng, 100), evaluations=evaluations, summary=summary)
    assert "The policy saw each prompt 12 times" in verdict(run, tmp_path).problems[0].text


@pytest.mark.parametrize("different", [12, 10_000])
def test_repeated_prompts_are_not_a_problem_if_held_out_data_confirms_the_rise(different, tmp_path):
    rng = np.random.default_rng(0)
    samples = on_prompts(prompt_samples(rng, 100), different)
    evaluations = held_out([0.2, 0.45, 0.6, 0.7], 100)
    result = verdict(Prepared(policy_metrics(rng, 100), evaluations=evaluations, samples=samples), tmp_path)
    assert (result.learned.state, keys(result)) == ("yes", [])


def test_distinct_prompts_without_a_held_out_rise_are_not_memorization(tmp_path):
    rng = np.random.default_rng(0)
    evaluations = held_out([0.3, 0.31, 0.28, 0.3], 100)
    run = Prepared(
        policy_metrics(rng, 100), evaluations=evaluations, samples=on_prompts(prompt_samples(rng, 100), 10_000)
    )
    result = verdict(run, tmp_path)
    assert (result.learned.state, keys(result)) == ("partly", ["not_on_held_out"])


@pytest.mark.parametrize(
    ("scores", "text"),
    [
        ([0.5, 0.7, 0.9, 0.91, 0.9, 0.92, 0.9], ", flat since step 40."),
        ([0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], "between the first and the last evaluation."),
    ],
)
def test_a_held_out_reward_that_stopped_rising_is_called_flat(scores, text, tmp_path):
    rng = np.random.default_rng(0)
    run = Prepared(policy_metrics(rng, 120), evaluations=held_out(scores, 120, 0.3, 100))
    learned = verdict(run, tmp_path).learned
    assert learned.state == "yes"
    assert text in learned.text


def collapsed(broke, steps, rng):
    """A run whose reward drops to 0 in step ``broke``; its learning rate warms up to 0.05 in 40 steps."""
    reward = np.where(np.arange(steps) < broke, 0.4, 0.0) + rng.normal(0, 0.01, steps) * (np.arange(steps) < broke)
    metrics = policy_metrics(rng, steps, reward=reward)
    metrics["rollout/rewards_max"] = np.where(reward > 0, 1.0, 0.0)
    metrics["train/lr"] = np.minimum(np.arange(1, steps + 1) / 40, 1) * 0.05
    return Prepared(metrics, {**OPTIONS, "lr": 0.05}, samples=prompt_samples(rng, steps))


@pytest.mark.parametrize(
    ("broke", "rate", "remedy"), [(7, "0.01, during the warm-up to 0.05", "--lr 0.001"), (60, "0.05.", "--lr 0.005")]
)
def test_a_collapse_names_its_step_and_suggests_a_lower_learning_rate(broke, rate, remedy, tmp_path):
    (problem,) = verdict(collapsed(broke, 100, np.random.default_rng(0)), tmp_path).problems
    assert problem.key == "collapsed"
    assert f"The reward collapsed at step {broke}, at a learning rate of {rate}" in problem.text
    assert f"{remedy} (now 0.05)" in problem.remedy


def cut_answers(steps, rewards, of_reward, share):
    """A run in which ``share`` of the answers of reward ``of_reward`` and below are cut at the limit."""
    rng = np.random.default_rng(0)
    samples = prompt_samples(rng, steps)
    for record in samples:
        record["finish_reason"] = "length" if record["reward"] <= of_reward and record["step"] > steps / 2 else "stop"
    truncated = np.where(np.arange(steps) > steps / 2, share, 0.02)
    return Prepared(
        policy_metrics(rng, steps, reward=rewards(rng), **{"train/truncated_ratio": truncated}), samples=samples
    )


def test_a_higher_limit_is_suggested_only_if_truncation_costs_reward(tmp_path):
    costly = cut_answers(80, lambda rng: curve(rng, 80, 0.3, 0.3), 0.0, 0.4)
    (problem,) = verdict(costly, tmp_path / "costly").problems
    assert "--max-new-tokens 512 (now 256)" in problem.remedy
    for rewards in (lambda rng: curve(rng, 80, 0.2, 0.97, 0.01), lambda rng: curve(rng, 80, 0.2, 0.7, 0.01)):
        harmless = cut_answers(80, rewards, 1.0, 0.4)  # all of them are cut, whatever their reward
        result = verdict(harmless, tmp_path / str(rewards(np.random.default_rng(0))[-1]))
        assert result.learned.state == "yes"
        (problem,) = result.problems
        assert "does not lower their reward" in problem.text
        assert "--max-new-tokens" not in problem.remedy


@pytest.mark.parametrize(("repeats", "advice"), [(False, False), (True, True)])
def test_rewards_that_are_all_equal_because_no_answer_finishes(repeats, advice, tmp_path):
    steps, zeros = 40, np.zeros(40)
    metrics = policy_metrics(np.random.default_rng(0), steps, reward=zeros, **{"train/truncated_ratio": zeros + 0.99})
    metrics |= {"rollout/rewards_max": zeros, "train/grad_norm": zeros, "train/zero_std_groups": zeros + 1}
    text = "and so on " * 30 if repeats else "7 and 8 is 15, carry 1; 4 and 3 and 1 is 8, so the answer is 8"
    samples = [sample(step, 0, 0, 0.0, completion=text, finish_reason="length") for step in range(steps)]
    (problem,) = verdict(Prepared(metrics, samples=samples), tmp_path).problems
    assert problem.key == "cut_off"
    assert problem.text.startswith(
        "99% of the answers in the last steps were truncated at the limit of 256 tokens, and all rewards are 0"
    )
    assert problem.remedy.index("--max-new-tokens 512") < problem.remedy.index("--reward-fn-path")
    assert ("never stops" in problem.remedy) == advice


def checkpoint(run, step, name=""):
    folder = run / "checkpoints" / (name or f"step_{step:06d}") / STATE_FOLDER
    folder.mkdir(parents=True)
    (folder / STATE_FILE).write_text(f'{{"format": 1, "step": {step}}}')


def test_the_remedy_resumes_from_the_last_checkpoint(tmp_path):
    status = {**FINISHED, "state": "stopped", "signal": "SIGTERM"}
    run = Prepared(policy_metrics(np.random.default_rng(0), 45), status=status).write(tmp_path / "run").path
    assert "The run has no checkpoint to resume from" in verdict_of(RunData(run)).ending.remedy
    checkpoint(run, 20)
    checkpoint(run, 40)
    remedy = verdict_of(RunData(run)).ending.remedy
    assert remedy == f"Continue the run from its checkpoint of step 40: areno train --resume {run}"


def test_the_remedy_of_an_experiment_that_cannot_be_resumed_names_its_last_saved_model(tmp_path):
    status = {**FINISHED, "state": "stopped", "signal": "SIGINT"}
    config = {**SETTINGS, "recover": {"mode": "disabled"}, "total_train_steps": 150}
    metrics = {"rollout/reward/avg": curve(np.random.default_rng(0), 51, 0.2, 0.9)}
    run = Prepared(metrics, config, status=status).write(tmp_path / "run")
    RunData(run.path).log_path.write_text("INFO x: Epoch 2/6 step 19/32 global step 51 (0.1 s, 2 s since the start)\n")
    ending = verdict_of(RunData(run.path)).ending
    assert "after 51 steps of 150 (total_train_steps=150)" in ending.text
    assert "No saved model was found." in ending.remedy
    model = "checkpoints/default/epoch1epochstep18globalstep50"
    (run.path / model).mkdir(parents=True)
    assert f"The last saved model is {model}." in verdict_of(RunData(run.path)).ending.remedy


def test_a_folder_without_a_configuration_is_not_its_own_saved_model(tmp_path):
    status = {**FINISHED, "state": "stopped", "signal": "SIGINT"}
    run = Prepared(policy_metrics(np.random.default_rng(0), 45), status=status).write(tmp_path / "run")
    run.config_path.unlink()
    assert "saved model" not in verdict_of(RunData(run.path)).ending.remedy


@pytest.mark.parametrize(
    ("limit", "text"), [(None, " of 192 (total_train_epochs=6)"), (500, " of 192 (total_train_epochs=6)")]
)
def test_the_planned_steps_of_an_experiment_are_those_of_all_its_epochs(limit, text, tmp_path):
    config = {**SETTINGS, "total_train_epochs": 6, "total_train_steps": limit}
    status = {**FINISHED, "state": "stopped", "signal": "SIGINT"}
    run = Prepared({"rollout/reward/avg": np.linspace(0.1, 0.2, 51)}, config, status=status).write(tmp_path / "run")
    RunData(run.path).log_path.write_text("INFO x: Epoch 2/6 step 19/32 global step 51 (0.1 s, 2 s since the start)\n")
    assert f"after 51 steps{text}" in verdict_of(RunData(run.path)).ending.text


@pytest.mark.parametrize(
    ("saved", "keep_best", "text"),
    [
        (("best", 20), True, "The model of step 20 is kept in checkpoints/best."),
        (("", 20), False, "The model of step 20 is kept in checkpoints/step_000020."),
        (("", 80), False, "The model of step 20 was not kept (--keep-best was off)."),
    ],
)
def test_the_verdict_says_whether_the_best_model_was_kept(saved, keep_best, text, tmp_path):
    losses = {0: 5.9, 20: 1.7, 40: 2.2, 60: 2.6, 80: 2.9}
    metrics = {"train/loss": 4 * np.exp(-np.arange(80) / 12)}
    config = {**OPTIONS, "algo": "sft", "epochs": 40, "keep_best": keep_best}
    run = (
        Prepared(metrics, config, {step: {"eval/loss": loss} for step, loss in losses.items()})
        .write(tmp_path / "run")
        .path
    )
    checkpoint(run, saved[1], saved[0])
    result = verdict_of(RunData(run))
    assert (result.learned.state, keys(result)) == ("memorized", ["memorized"])
    assert text in result.problems[0].text
    assert ("--keep-best and" in result.problems[0].remedy) != keep_best


def test_step_0_of_an_experiment_may_be_the_model_after_its_first_update(tmp_path):
    """An experiment numbers the evaluation before training and the one after its first update 0."""
    for before in (True, False):
        config = {**SETTINGS, "evaluator": {"eval_before_train": before}}
        run = Prepared({"rollout/reward/avg": np.linspace(0.1, 0.2, 20)}, config).write(tmp_path / f"{before}").path
        checkpoint(run, 1, "recover/step_000001")
        text = kept(data := RunData(run), OptionAdvice(data), 0)
        if before:
            assert text == (
                "The best model is the initial model or the model after the first step (both evaluations count as step 0)."
            )
        else:
            assert text == "The model of step 0 is kept in checkpoints/recover/step_000001."


@pytest.mark.parametrize("shared", [0, 1, 4])
def test_held_out_prompts_that_are_trained_on_are_counted(shared, tmp_path):
    rng = np.random.default_rng(0)
    run = Prepared(policy_metrics(rng, 40), samples=prompt_samples(rng, 40)).write(tmp_path / "run")
    prompts = [f"What is 7 plus {index}?" for index in range(shared)] + [f"New {index}?" for index in range(8 - shared)]
    for step in (0, 40):
        run.append_eval_samples(
            {"step": step, "prompt_index": index, "reward": 0.5, "prompt": prompt, "completion": "Yes."}
            for index, prompt in enumerate(prompts)
        )
    result = verdict_of(RunData(run.path))
    assert result.learned.state == "yes"
    assert keys(result) == ["contaminated"] * bool(shared)
    if shared:
        assert f"{shared} of 8 recorded held-out prompts are training prompts too" in result.problems[0].text
        assert "--eval-dataset-path" in result.problems[0].remedy
