"""Every agentic example end to end: data, prompts, the agent in a real session, and a matching reward."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

from areno.api.agentic.demonstrations import says
from areno.api.datasets import load_training_dataset
from areno.config.hooks import LOADER_HOOK, load_hook
from areno.rewards import RewardRunner
from areno.types import RewardRecord
from tests.agentic.stage import open_trainer
from tests.examples import scripted
from tests.support.cli import areno, environment

REPO = scripted.FOLDER.parents[1]
GENERATED = [name for name in scripted.NAMES if name != "coding"]


@pytest.fixture(params=scripted.NAMES)
def name(request):
    if request.param == "coding":
        skip_without_sandbox()
    return request.param


def skip_without_sandbox():
    sandbox = scripted.module(scripted.FOLDER / "coding" / "sandbox.py")
    try:
        sandbox.working_method()
    except sandbox.NoSandboxError as error:
        pytest.skip(str(error))


def generate(name, output, *options):
    program = scripted.FOLDER / name / "dataset_generator.py"
    done = subprocess.run(
        [sys.executable, program, "--output", output, *map(str, options)],
        **{"capture_output": True, "text": True, "timeout": 60, "env": environment()},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in output.read_text().splitlines()]


def load(name, path):
    hook = load_hook(str(scripted.FOLDER / name / "dataset_loader.py"), LOADER_HOOK)
    return load_training_dataset(str(path), hook)


@pytest.mark.parametrize("name", GENERATED)
def test_equal_seeds_give_equal_files_with_different_rows(name, tmp_path):
    one = generate(name, tmp_path / "a.jsonl", "--count", 12, "--seed", 5)
    assert one[:8] == generate(name, tmp_path / "b.jsonl", "--count", 8, "--seed", 5)
    assert one != generate(name, tmp_path / "c.jsonl", "--count", 12, "--seed", 6)
    assert len({json.dumps(row) for row in one}) == 12


def test_the_loader_gives_the_prompt_that_the_agent_starts_with(name, tmp_path):
    course = scripted.course(name)
    rows = [dict(course.draw(random.Random(seed))) for seed in range(4)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load(name, path)
    assert [row["prompt"] for row in loaded] == [course.make().reset(row) for row in rows]
    # The rows of a file pass through Arrow, which must not change what the environment reads.
    assert [course.make().reset(row) for row in loaded] == [course.make().reset(row) for row in rows]


def test_agent_and_reward_agree_with_the_environment(name, tmp_path):
    course = scripted.course(name)
    with open_trainer(scripted.untrained(tmp_path, course)) as trainer:
        for seed in (1, 2):
            row, messages, tools = scripted.played(course, seed)
            sample = scripted.perform(trainer, scripted.agent(name), row, scripted.lines_of(trainer, messages, tools))
            own_words = [message for message in sample.record.messages if message["role"] == "assistant"]
            experts = [message for message in messages if message["role"] == "assistant"]
            assert scripted.plain(own_words) == scripted.plain(experts)
            if name != "coding":  # its test runs print times
                assert scripted.plain(sample.record.messages) == scripted.plain(messages)
            assert len(sample.rows) == 1, "one conversation is one row"
            value = scripted.rewarded(scripted.reward(name), sample.record)
            assert value == scripted.replayed(scripted.reward(name), row, messages)
            assert value >= 0.8 or name == "duelgrid"


def test_useless_answers_get_the_lowest_reward(name):
    course = scripted.course(name)
    row = dict(course.draw(random.Random(3)))
    # A duel continues without the model's moves, and is lost.
    value = scripted.replayed(scripted.reward(name), row, [says("I do not know.")] * 12)
    assert value == -1.0 or (name == "duelgrid" and value < -2)


def test_the_reward_runs_in_its_worker_process(name):
    course = scripted.course(name)
    row, messages, _ = scripted.played(course, 4)
    records = [RewardRecord(messages=messages, source_record=row), RewardRecord(messages=[], source_record=row)]
    with RewardRunner(path=str(scripted.FOLDER / name / "reward.py"), timeout_s=60, workers=1) as runner:
        values = [outcome.value for outcome in runner.run(records)]
    assert values == [scripted.rewarded(scripted.reward(name), record) for record in records]
    assert values[0] > values[1] or name == "duelgrid"  # its expert may lose, which is worth less than no duel


@pytest.mark.long
@pytest.mark.parametrize("name", scripted.NAMES)
def test_an_example_trains_on_a_cpu(name, tmp_path):
    if name == "coding":
        skip_without_sandbox()
    course = scripted.course(name)
    path = scripted.FOLDER / "coding" / "dataset.jsonl"
    if name != "coding":
        path = tmp_path / "rows.jsonl"
        generate(name, path, "--count", 4)
    model = tmp_path / "start" / "model"
    begin = [
        "--expert",
        scripted.FOLDER / name / "expert.py",
        "--output",
        tmp_path / "start",
        "--count",
        12,
        "--steps",
        20,
    ]
    done = subprocess.run(
        [sys.executable, scripted.FOLDER / "warm_start.py", *map(str, begin)],
        **{"capture_output": True, "text": True, "timeout": 240, "env": environment()},
    )
    assert done.returncode == 0, done.stderr
    assert course.max_turns
    files = {"--dataset-loader-fn": "dataset_loader", "--reward-fn-path": "reward", "--agent-fn": "run_agent"}
    done = areno(
        *("train", "--algo", "gspo", "--ckpt", model, "--dataset-path", path, "--run-dir", tmp_path / "run"),
        *(part for flag, file in files.items() for part in (flag, scripted.FOLDER / name / f"{file}.py")),
        *("--batch-size", 2, "--n-samples", 2, "--max-steps", 1, "--max-new-tokens", 64, "--max-context-len", 1500),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # A duel that exceeds the context is filtered.
    filtered = metrics[-1]["train/agent_filtered_long"]
    assert metrics[-1]["rollout/num_sequences"] + filtered == 4
    assert filtered < 4
