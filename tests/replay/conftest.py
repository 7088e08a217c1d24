"""Runs that replay tests share: small, in fp32 on one process, with a checkpoint before and after every step."""

from __future__ import annotations

import json

import pytest

from areno.cli.main import main
from tests.agentic.agents import write_agent
from tests.support.cli import task_arguments, write_task

OPTIONS = {
    "grpo": ["--update-epochs", "2", "--update-minibatches", "2", "--grpo-clip-eps", "0.002"],
    "gspo": ["--kl-coef", "0.1"],
    "ppo": ["--critic-warmup-steps", "1", "--kl-reward-coef", "0.05"],
    "icepop": ["--update-epochs", "2"],
    "m2po": ["--gradient-accumulation-steps", "1"],
    "lora": ["--lora-rank", "4"],
    "agent": ["--max-context-len", "256"],
}


AGENT = """

async def run_agent(ctx, batch):
    return await asyncio.gather(*(fork(ctx, item) for item in batch.iter_samples()))


async def fork(ctx, item):
    once, twice = await talk(ctx, item, 1), await talk(ctx, item, 2)
    return AgentTrajectory([*once.turns, *twice.turns])
"""
"""Its second conversation does not extend the first one, so that a sample has two rows."""


def run_training(folder, checkpoint, name, *more):
    algo = "grpo" if name in ("lora", "agent") else name
    run = folder / name
    if name == "agent":
        more = (*more, "--agent-fn", str(write_agent(folder, AGENT)))
    arguments = task_arguments(algo, checkpoint, write_task(folder / "task"), run)
    shared = ["--save-interval", "1", "--max-steps", "3", "--temperature", "0.9", *OPTIONS.get(name, [])]
    assert main([*map(str, arguments), *shared, *more]) == 0
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_checkpoint):
    """Finished runs by the name of their options, created on first use."""
    folder, made = tmp_path_factory.mktemp("runs"), {}

    def of(name):
        if name not in made:
            made[name] = run_training(folder, tiny_checkpoint, name, "--save-rollouts", "2")
        return made[name]

    return of


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def of_step(run, step, file="metrics.jsonl"):
    return [line for line in lines(run / file) if line["step"] == step]
