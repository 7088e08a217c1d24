"""Runs on several ranks: the command line, faults in every phase, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.cli import areno, start, task_arguments, wait_for_text, write_task
from tests.support.processes import workers_of
from tests.support.tiny import save_tiny_checkpoint

pytestmark = pytest.mark.long

RANKS = ("--world-size", 2)
SLOW_REWARD = """
import time

def reward_fn(record):
    time.sleep(0.25)
    return float(len(record.completion) % 3)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("ckpt") / "llama", "llama", heads=4, hidden=64)


def none_left(pids: list[int], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(os.path.exists(f"/proc/{pid}") for pid in pids):
            return True
        time.sleep(0.1)
    return False


PHASES = {
    "rollout": "stage=rollout_start",
    "reward": "stage=rollout_end",
    "train": "stage=train_start",
    "save": "stage=save_checkpoint_start",
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_killed_or_stopped_rank_ends_the_run_and_is_named(phase, signum, checkpoint, tmp_path):
    task = write_task(tmp_path / "task")
    if phase == "reward":
        task["reward.py"].write_text(SLOW_REWARD)
    run = tmp_path / "run"
    options = [*RANKS, "--save-interval", 1, "--max-steps", 500]
    process = start(*task_arguments("grpo", checkpoint, task, run), *options)
    wait_for_text(process, "save_checkpoint_end")
    wait_for_text(process, PHASES[phase])
    pids = workers_of(process.pid)
    assert len(pids) == 2
    os.kill(pids[1], signum)
    began = time.monotonic()
    output, _ = process.communicate(timeout=90)
    assert time.monotonic() - began < 40, "at most 30 s, plus the time of one reward per row"
    assert process.returncode not in (0, None)
    expected = "was killed by signal 9" if signum == signal.SIGKILL else "suspended by a signal"
    assert "rank 1 of 2" in output
    assert expected in output
    assert none_left(pids)

    complete = sorted(p for p in (run / "checkpoints").iterdir() if not p.name.startswith("."))
    load_file(complete[-1] / "model.safetensors")
    done = json.loads((complete[-1] / "trainer_state" / "state.json").read_text())["step"]
    resumed = areno("train", "--resume", run, "--max-steps", done + 1, "--world-size", 1)
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout


def test_workers_do_not_outlive_a_run_that_is_killed(checkpoint, tmp_path):
    task = write_task(tmp_path / "task")
    process = start(*task_arguments("grpo", checkpoint, task, tmp_path / "run"), *RANKS, "--max-steps", 500)
    wait_for_text(process, "step 2/")
    pids = workers_of(process.pid)
    process.kill()
    process.communicate()
    assert len(pids) == 2
    assert none_left(pids)


def test_ctrl_c_saves_and_the_run_resumes_in_another_layout(checkpoint, tmp_path):
    task, run = write_task(tmp_path / "task"), tmp_path / "run"
    layout = ("--world-size", 2, "--tp-size", 2)
    process = start(
        *task_arguments("grpo", checkpoint, task, run), *layout, "--max-steps", 500, "--save-interval", 1000
    )
    wait_for_text(process, "step 2/")
    pids = workers_of(process.pid)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in output
    assert none_left(pids)
    [saved] = (run / "checkpoints").iterdir()
    done = json.loads((saved / "trainer_state" / "state.json").read_text())["step"]
    finished = areno("train", "--resume", run, "--max-steps", done + 2, "--world-size", 2, "--tp-size", 1)
    assert finished.returncode == 0, finished.stderr
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(done + 2))


def test_an_adapter_learns_with_tensor_parallelism_and_resumes_in_one_process(checkpoint, tmp_path):
    pytest.importorskip("peft")
    task, adapters = write_task(tmp_path / "task"), {}
    lora = ("--lora-rank", 4, "--kl-coef", "0.1", "--adam-eps", "1e-4", "--eager-decode")
    for name, layout in (("one", ()), ("spread", ("--world-size", 2, "--tp-size", 2))):
        run = tmp_path / name
        done = areno(*task_arguments("grpo", checkpoint, task, run), *lora, *layout, "--max-steps", 2)
        assert done.returncode == 0, done.stderr + done.stdout
        resumed = areno("train", "--resume", run, "--max-steps", 3, "--world-size", 1, "--tp-size", 1)
        assert resumed.returncode == 0, resumed.stderr + resumed.stdout
        assert not list((run / "checkpoints" / "step_000003").glob("model*.safetensors"))
        adapters[name] = load_file(run / "checkpoints" / "step_000003" / "adapter_model.safetensors")
    assert adapters["one"].keys() == adapters["spread"].keys()
    for name, tensor in adapters["one"].items():
        assert (adapters["spread"][name] - tensor).abs().max() <= 1e-4 * tensor.abs().max(), name


@pytest.mark.parametrize("algo", ["sft", "dpo", "ppo"])
def test_other_algorithms_learn_the_same_on_two_ranks(algo, checkpoint, tmp_path):
    task = write_task(tmp_path / "task")
    for name, layout in (("one", ()), ("two", RANKS)):
        run = tmp_path / name
        if algo == "dpo":
            pairs = tmp_path / "pairs.jsonl"
            entry = {"prompt": "What is 1 plus 2?", "chosen": "The answer is 3.", "rejected": "The answer is 4."}
            pairs.write_text("\n".join(json.dumps(entry) for _ in range(12)))
            arguments = ["train", "--algo", "dpo", "--ckpt", checkpoint, "--dataset-path", pairs]
            arguments += ["--run-dir", run, "--batch-size", 4, "--mini-bs", 4, "--lr", "1e-3"]
        else:
            arguments = task_arguments(algo, checkpoint, task, run)
            if algo == "ppo":
                arguments += ["--critic-warmup-steps", 1, "--eager-decode"]
        done = areno(*arguments, *layout, "--max-steps", 3, "--save-interval", 1, "--adam-eps", "1e-6")
        assert done.returncode == 0, done.stderr + done.stdout
    same = steps_with_the_same_samples(tmp_path / "one", tmp_path / "two")
    assert same == 3 or (algo == "ppo" and same == 2)
    folder = Path("checkpoints") / f"step_{same:06d}" / "model.safetensors"
    one, two = (load_file(tmp_path / name / folder) for name in ("one", "two"))
    for name, tensor in one.items():
        assert (two[name] - tensor).abs().max() <= 1e-4 * tensor.abs().max(), name


def steps_with_the_same_samples(*runs):
    """Steps before two runs diverge: where two tokens of a random model are equally likely, rounding decides."""
    rows = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
    pairs = [tuple(row.get("rollout/rewards_mean") for row in steps) for steps in zip(*rows, strict=True)]
    return next((index for index, (one, two) in enumerate(pairs) if one != two), len(pairs))


def test_a_run_with_sharded_weights_resumes_in_one_process_and_back(checkpoint, tmp_path):
    """What four steps of GRPO learn does not depend on how the weights were sharded."""
    task, weights = write_task(tmp_path / "task"), {}
    courses = {
        "one": [(), (), ()],
        "spread": [(*RANKS, "--fsdp"), ("--world-size", 1, "--no-fsdp"), (*RANKS, "--fsdp")],
    }
    for name, course in courses.items():
        run = tmp_path / name
        arguments = [*task_arguments("grpo", checkpoint, task, run), "--adam-eps", "1e-6", "--eager-decode"]
        for layout, steps in zip(course, (2, 3, 4), strict=True):
            done = areno(*arguments, *layout, "--max-steps", steps)
            assert done.returncode == 0, done.stderr + done.stdout
            arguments = ["train", "--resume", run]
        weights[name] = load_file(run / "checkpoints" / "step_000004" / "model.safetensors")
    for name, tensor in weights["one"].items():
        assert (weights["spread"][name] - tensor).abs().max() <= 1e-4 * tensor.abs().max(), name


@pytest.mark.parametrize("layout", [(), ("--fsdp",)], ids=["dp", "fsdp"])
def test_an_agent_trains_on_two_ranks(layout, checkpoint, tmp_path):
    """Agents talk to the server of an engine on several ranks, with streaming too."""
    task, run = write_task(tmp_path / "task"), tmp_path / "run"
    agent = tmp_path / "agent.py"
    agent.write_text(
        "from openai import AsyncOpenAI\n"
        "from areno.api.agentic import AgentTrajectoryTurn\n"
        "async def run_agent(ctx, batch):\n"
        "    turns = []\n"
        "    client = AsyncOpenAI(base_url=ctx.get_base_url(), api_key=ctx.api_key)\n"
        "    for item in batch.iter_samples():\n"
        "        messages = [{'role': 'user', 'content': item.prompt}]\n"
        "        answer = await client.chat.completions.create(model='policy', messages=messages, max_tokens=8)\n"
        "        turns.append(AgentTrajectoryTurn(item=item, messages=messages, response=answer))\n"
        "        stream = await client.chat.completions.create(model='policy', messages=messages, max_tokens=4, stream=True)\n"
        "        assert len([chunk async for chunk in stream]) > 1\n"
        "    return turns\n"
    )
    arguments = task_arguments("grpo", checkpoint, task, run)
    done = areno(*arguments, *RANKS, *layout, "--agent-fn", agent, "--max-steps", 2)
    assert done.returncode == 0, done.stderr + done.stdout
