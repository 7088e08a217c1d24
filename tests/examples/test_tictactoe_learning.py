"""Tic-tac-toe is learned: a model that only reads boards and calls the tool learns to play on unseen boards."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time

import pytest

from tests.examples import scripted
from tests.support.cli import areno, environment

STEPS = 60


def held_out_reward(checkpoint):
    """Mean reward of a sampled move on 1,024 held-out boards."""
    from areno import SamplingParams
    from areno.api.agentic import AgentBatch, LossMaskPolicy
    from areno.api.agentic.collect import AgentRunner
    from tests.agentic.stage import open_trainer

    draw = scripted.module(scripted.FOLDER / "tictactoe" / "tictactoe.py").draw_record
    rows = [draw(random.Random(f"held out {index}"), held_out=True) for index in range(1024)]
    agent, reward = scripted.agent("tictactoe"), scripted.reward("tictactoe")
    with open_trainer(checkpoint) as trainer:
        runner = AgentRunner(agent, LossMaskPolicy(), trainer.get_tokenizer(), timeout_s=300, retries=0)
        with trainer.rollout_session(
            sampling_params=SamplingParams(max_new_tokens=32), max_running_prompts=256, proxy=True
        ) as ctx:
            collected = runner.collect(ctx.proxy, AgentBatch(rows, [""] * len(rows), [[1]] * len(rows), 1))
    assert not collected.errors
    rewards = [asyncio.run(reward(sample.record)) for sample in collected.samples]
    return sum(rewards) / len(rewards)


def run(program, *options):
    command = [sys.executable, scripted.FOLDER / program, *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment())
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_reward_rises_within_five_minutes(seed, tmp_path):
    began = time.monotonic()
    folder = scripted.FOLDER / "tictactoe"
    reader = ("--expert", f"{folder / 'expert.py'}:READER", "--count", 12800, "--steps", 400)
    run("warm_start.py", *reader, "--output", tmp_path, "--seed", seed)
    run("tictactoe/dataset_generator.py", "--output", tmp_path / "boards.jsonl", "--count", 4096, "--seed", seed)
    done = areno(
        *("train", "--algo", "gspo", "--ckpt", tmp_path / "model", "--dataset-path", tmp_path / "boards.jsonl"),
        *("--dataset-loader-fn", folder / "dataset_loader.py", "--reward-fn-path", folder / "reward.py"),
        *("--agent-fn", folder / "run_agent.py", "--run-dir", tmp_path / "run", "--seed", seed),
        *("--batch-size", 32, "--n-samples", 8, "--mini-bs", 256, "--max-new-tokens", 32, "--max-steps", STEPS),
        *("--lr", 1e-3, "--min-lr", 0, "--lr-decay-style", "linear", "--lr-decay-steps", STEPS, "--adam-beta2", 0.98),
        *("--kl-coef", 0.05, "--tree-training"),
        timeout=900,
    )
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stdout + done.stderr
    before = held_out_reward(tmp_path / "model")
    after = held_out_reward(tmp_path / "run" / "checkpoints" / f"step_{STEPS:06d}")
    print(f"seed {seed}: held-out reward {before:.3f} -> {after:.3f} in {seconds:.0f} s")
    assert before < -0.3
    assert after > 0.5
    assert seconds < 300
