"""``areno diff`` names the first step that differs, its first differing phase in causal order, and the settings behind it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from areno.cli.main import main
from tests.reports.written_runs import write_run
from tests.support.cli import task_arguments, write_task


def diff(capsys, first, second):
    """Exit code, text, and the data of ``--json``."""
    code = main(["diff", str(first), str(second)])
    text = capsys.readouterr().out
    assert main(["diff", str(first), str(second), "--json"]) == code
    return code, text, json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def changed(step, change, prompt=0, sample=1):
    """A function that changes one sample of a step, or all of them if ``prompt`` is None."""

    def samples(record):
        where = (record["step"], record["prompt_index"], record["sample_index"])
        if where == (step, prompt, sample) or (prompt is None and record["step"] == step):
            change(record)
        return record

    return samples


def from_step(step, **values):
    return lambda at, record: {**record, **{name.replace("__", "/"): value for name, value in values.items()}} if (
        at >= step
    ) else record  # fmt: skip


def test_equal_runs_have_no_difference_even_if_their_timings_differ(tmp_path, capsys):
    slower = lambda step, record: {**record, "time/rollout": 9.0, "train/tokens_per_second": 5.0}  # noqa: E731
    code, text, data = diff(capsys, write_run(tmp_path / "a"), write_run(tmp_path / "b", metrics=slower))
    assert code == 0
    assert "No difference: all 4 steps are bit-equal." in text
    assert data["equal"] is True
    assert data["divergence"] == {"steps": 4, "last_step": 3, "unequal": None, "different": None}
    assert data["settings"] == data["environment"] == []


def test_rounding_is_reported_but_is_not_a_difference(tmp_path, capsys):
    nearly = from_step(2, train__loss=0.25 / 3 * (1 + 1e-8))
    code, text, data = diff(
        capsys, write_run(tmp_path / "a", steps=3), write_run(tmp_path / "b", steps=3, metrics=nearly)
    )
    assert code == 0
    assert (
        "all 3 steps agree to within 1e-6, but are not bit-equal from step 2 on: train/loss is 0.0833333333 in" in text
    )
    assert "in the first run and 0.0833333342 in the second (relative" in text
    assert data["divergence"]["unequal"]["metrics"][0]["relative"] == pytest.approx(1e-8, rel=1e-3)


def test_a_run_with_more_steps_differs(tmp_path, capsys):
    code, text, _ = diff(capsys, write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=6))
    assert code == 1
    assert "No difference: the 4 steps that both runs recorded are bit-equal." in text


def swap_prompts(record):
    record["prompt_index"] = 1 - record["prompt_index"]


def set_prompt(record):
    record["rows"][0][0]["tokens"] = [1, 2, 99]
    record["prompt"] = "Another question"


def template(record):
    record["rows"][0][0]["tokens"] = [1, 2, 99]


def tokens(record):
    record["rows"][0][1]["tokens"][2] = 77
    record["rows"][0][1]["logprobs"] = [-1.0000002, -1.5, -4.0, -4.0]
    record["reward"] = 0.25


def logprobs(record):
    tokens(record)
    record["rows"][0][1]["logprobs"][1] = -1.503


def reward(record):
    record |= {"reward": 0.5, "reward_parts": {"short": 0.5}, "advantage": 0.1}


def advantage(record):
    record["advantage"] = 0.75


@pytest.mark.parametrize(
    ("change", "prompt", "phase", "words"),
    [
        (swap_prompts, None, "prompts", "the prompts are the same, but their order differs"),
        (set_prompt, 0, "prompts", r"prompt 0 is 'Question 0' in the first run and 'Another question' in the second"),
        (template, 0, "prompts", "prompt 0 has the same text, but different tokens: the tokenizer or the chat template"),
        (logprobs, 0, "log-probs", r"log-probs of equal tokens differ by up to 3\.0e-03 \(sample 2/0/0\)"),
        (tokens, 0, "sampled tokens", r"2/0/0 on, sampled tokens differ; before the first token that differs in each "
         r"sample, the log-probs of the sampled tokens \(14 in total\) agree to within"),
        (reward, 0, "rewards", r"sample 2/0/0 is 0 in the first run and 0\.5 in the second \(short: 0\.0 and 0\.5\)"),
        (advantage, 0, "advantages", r"rewards are the same, but the advantage of sample 2/0/0 is -0\.5 in the first run"),
    ],
)  # fmt: skip
def test_the_first_phase_that_differs_is_read_from_the_samples(change, prompt, phase, words, tmp_path, capsys):
    # Consequences in the metrics: everything differs from that step on.
    follows = from_step(2, rollout__rewards_mean=9.0, train__loss=9.0, rollout__logprobs_mean=-9.0)
    other = write_run(tmp_path / "b", metrics=follows, samples=changed(2, change, prompt, 0))
    code, text, data = diff(capsys, write_run(tmp_path / "a"), other)
    assert code == 1
    different = data["divergence"]["different"]
    assert (different["step"], different["phase"]) == (2, phase)
    assert re.search(words, different["text"])
    assert f"First difference: step 2, {phase}" in text
    assert {metric["name"] for metric in different["metrics"]} == {
        *("rollout/rewards_mean", "train/loss", "rollout/logprobs_mean")
    }


def test_prompts_whose_tokens_only_one_run_recorded_are_compared_by_their_text(tmp_path, capsys):
    def longer(record):
        del record["rows"]  # the budget for tokens was spent by longer answers
        record["completion"] += " in more words"

    other = write_run(tmp_path / "b", samples=changed(2, longer, 0, 0), metrics=from_step(2, train__loss=9.0))
    _, text, data = diff(capsys, write_run(tmp_path / "a"), other)
    assert data["divergence"]["different"]["phase"] == "sampled tokens"
    assert "tokenizer" not in text


def test_differing_tool_tokens_are_distinguished_from_sampled_tokens(tmp_path, capsys):
    def with_tool(result):
        def samples(record):
            segment = {"role": "tool", "turn": 1, "trained": False, "version": -1, "tokens": [8, result]}
            record["rows"][0].append({**segment, "texts": ["", ""], "logprobs": [0.0] * 2, "advantages": [0.0] * 2})
            return record

        return samples

    first = write_run(tmp_path / "a", samples=with_tool(1))
    second = write_run(tmp_path / "b", samples=with_tool(2), metrics=from_step(0, train__loss=7.0))
    _, _, data = diff(capsys, first, second)
    expected = "but from token 5 of sample 0/0/0 on, tokens that were not sampled (tool results, messages) differ"
    assert expected in data["divergence"]["different"]["text"]


def test_samples_that_differ_before_any_metric_are_reported(tmp_path, capsys):
    other = write_run(tmp_path / "b", samples=changed(1, reward), metrics=from_step(3, train__loss=5.0))
    _, _, data = diff(capsys, write_run(tmp_path / "a"), other)
    assert (data["divergence"]["different"]["step"], data["divergence"]["different"]["phase"]) == (1, "rewards")


@pytest.mark.parametrize(
    ("values", "config", "phase", "cause"),
    [
        ({"train__lr": 0.2}, {"lr": 0.2}, "update", "lr: 0.1 in the first run, 0.2 in the second"),
        ({"train__lr": 1e-9}, {"lr": 1e-9}, "update", "lr: 0.1 in the first run, 1e-09 in the second"),
        (
            {"rollout__prompt_len_mean": 5.0, "train__loss": 1.0},
            {"shuffle": False},
            "prompts",
            "shuffle: True in the first run, False in the second",
        ),
        (
            {"rollout__rewards_mean": float("nan")},
            {"reward_normalize_parts": True},
            "rewards",
            "reward_normalize_parts: - in the first run, True in the second",
        ),
    ],
)
def test_the_phase_comes_from_the_metrics_if_no_samples_differ(values, config, phase, cause, tmp_path, capsys):
    config = {**config, "eval_interval": 7}
    other = write_run(tmp_path / "b", config=config, metrics=from_step(0, **values))
    code, text, data = diff(capsys, write_run(tmp_path / "a"), other)
    assert (code, data["divergence"]["different"]["phase"], data["divergence"]["different"]["step"]) == (1, phase, 0)
    assert f"Differences that affect this phase: {cause}\n" in text  # and not eval_interval


def test_settings_are_split_by_whether_they_change_results(tmp_path, capsys):
    for name, content in (("one", "1\n"), ("two", "1\n"), ("three", "2\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.jsonl").write_text(content)
    config = {"dataset_path": str(tmp_path / "one" / "data.jsonl"), "api_token": "hf_secret"}
    first = write_run(tmp_path / "a", config=config)
    for folder, decisive, code in (("two", False, 0), ("three", True, 1)):
        moved = {"dataset_path": str(tmp_path / folder / "data.jsonl"), "save_interval": 5, "api_token": "hf_other"}
        got, text, data = diff(capsys, first, write_run(tmp_path / f"b-{folder}", config=moved))
        assert got == code
        settings = {each["name"]: each for each in data["settings"]}
        assert settings["dataset_path"]["values"] == ["one/data.jsonl", f"{folder}/data.jsonl"]
        assert settings["dataset_path"]["changes_results"] is decisive
        assert settings["save_interval"] == {
            **{"name": "save_interval", "values": [100, 5], "changes_results": False, "same": 0}
        }
        assert "hf_" not in text + json.dumps(data)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc")
def test_files_that_cannot_be_read_count_as_different(tmp_path, capsys):
    # The first page of a process is unreadable, even for root.
    runs = [
        write_run(tmp_path / name, config={"dataset_path": f"/proc/{name}/mem"}) for name in ("self", "thread-self")
    ]
    code, _, data = diff(capsys, *runs)
    (setting,) = data["settings"]
    assert (code, setting["name"], setting["changes_results"]) == (1, "dataset_path", True)


def test_the_environment_is_compared_without_its_timestamp(tmp_path, capsys):
    other = {"cores": 8, "packages": {"torch": "2.14.0"}, "recorded": 2.0}
    _, _, data = diff(capsys, write_run(tmp_path / "a"), write_run(tmp_path / "b", environment=other))
    assert {each["name"]: each["values"] for each in data["environment"]} == {
        **{"cores": [2, 8], "packages.torch": ["2.13.0", "2.14.0"]}
    }


def test_curves_cover_the_steps_that_both_runs_have(tmp_path, capsys):
    doubled = lambda step, record: {**record, "rollout/rewards_mean": step / 4}  # noqa: E731
    _, text, data = diff(
        capsys, write_run(tmp_path / "a", steps=5), write_run(tmp_path / "b", steps=3, metrics=doubled)
    )
    curves = {curve["key"]: curve for curve in data["curves"]}
    assert curves["reward"] == {
        "key": "reward",
        "names": ["rollout/rewards_mean"] * 2,
        "steps": 3,
        "first": [0.0, 0.0],
        "last": [0.25, 0.5],
        "mean": [0.125, 0.25],
        "difference": 0.125,
    }
    assert curves["reward_parts/short"]["last"] == [0.125, 0.125]
    assert re.search(r"reward  +0  +0  +0\.25  +0\.5  +0\.125  +0\.25  +\+0\.125", text)


def test_runs_of_both_front_ends_are_compared_by_what_their_metrics_mean(tmp_path, capsys):
    names = {
        "rollout/rewards_mean": "rollout/reward/avg",
        "train/loss": "ppo_actor/update/actor_loss/avg",
        "train/lr": "ppo_actor/update/lr",
    }
    settings = {
        "experiment_name": "e",
        "seed": 0,
        "actor": {"optimizer": {"lr": 0.3}},
        "train_dataset": {"shuffle": True},
    }
    experiment = write_run(
        tmp_path / "b",
        metrics=lambda step, record: {new: record[old] * (3 if "lr" in old else 1) for old, new in names.items()},
    )
    (experiment / "config.yaml").write_text(yaml.safe_dump(settings))
    code, _, data = diff(capsys, write_run(tmp_path / "a"), experiment)
    assert code == 1
    assert [run["command"] for run in data["runs"]] == ["areno train", "areno run"]
    assert [(each["name"], each["values"]) for each in data["settings"]] == [("lr", [0.1, 0.3])]
    assert [metric["name"] for metric in data["divergence"]["different"]["metrics"]] == ["learning_rate"]
    assert {"reward", "loss", "learning_rate"} == {curve["key"] for curve in data["curves"]}


def test_arguments_other_than_two_runs_are_a_usage_error(tmp_path, capsys):
    assert main(["diff", str(write_run(tmp_path / "a")), str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    assert main(["diff", str(tmp_path / "a")]) == 2


def test_text_from_a_model_does_not_control_the_terminal(tmp_path, capsys):
    def evil(record):
        set_prompt(record)
        record["prompt"] = "\x1b[2J"

    _, text, _ = diff(capsys, write_run(tmp_path / "a"), write_run(tmp_path / "b", samples=changed(0, evil, 0, 0)))
    assert all(character.isprintable() or character == "\n" for character in text)


@pytest.fixture(scope="module")
def trained(tiny_checkpoint, tmp_path_factory):
    """Real runs without shuffling: one, the same again, one with another seed, and one with another reward."""
    folder = tmp_path_factory.mktemp("trained")
    task = write_task(folder / "task")
    reward = folder / "reward.py"
    reward.write_text(task["reward.py"].read_text().replace("1 + len", "2 + len"))
    more = {"a": [], "again": [], "seeded": ["--seed", "1"], "scored": ["--reward-fn-path", str(reward)]}
    for name, words in more.items():
        words = [*map(str, task_arguments("grpo", tiny_checkpoint, task, folder / name)), "--no-shuffle", *words]
        assert main([*words, "--max-steps", "2"]) == 0
    return folder


def test_real_runs_first_differ_where_they_should(trained, capsys):
    capsys.readouterr()
    assert diff(capsys, trained / "a", trained / "again")[0] == 0
    for name, phase, cause in (("seeded", "sampled tokens", "seed"), ("scored", "rewards", "reward_fn_path")):
        code, _, data = diff(capsys, trained / "a", trained / name)
        assert code == 1
        assert (data["divergence"]["different"]["step"], data["divergence"]["different"]["phase"]) == (0, phase)
        assert [each["name"] for each in data["causes"]] == [cause]
    records = [json.loads(line) for line in Path(trained / "a" / "metrics.jsonl").read_text().splitlines()]
    rewards = [record["rollout/rewards_mean"] for record in records]
    curve = next(curve for curve in data["curves"] if curve["key"] == "reward")
    assert (curve["first"][0], curve["last"][0]) == (rewards[0], rewards[-1])
    assert curve["mean"][0] == pytest.approx(sum(rewards) / len(rewards))
