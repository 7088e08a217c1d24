"""Rewards that fail, hang or are all equal, in whole runs: a clear error, count or warning, never a silent zero.

One run is a separate process; the others call the same entry point in this process, which saves start-up time.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areno.cli.main import main
from tests.support.cli import areno, task_arguments, write_task

# Without shuffling, the rows of a step are sums 0 + b for six values of b: the sums of step 0 are 0 to 5.
PREAMBLE = """
def bad(record):
    return int(record.source_record["solutions"][0]) % 7 == 3


def reward_fn(record):
    """
RAISES = PREAMBLE + "if bad(record): raise KeyError('no such unit')\n    return float(len(record.completion))\n"
HANGS = PREAMBLE + "import time\n    if bad(record): time.sleep(600)\n    return float(len(record.completion))\n"
EXITS = PREAMBLE + "import os\n    if bad(record): os._exit(1)\n    return float(len(record.completion))\n"
NAN = PREAMBLE + "return float('nan') if bad(record) else 1.0\n"
ASYNC = """
import asyncio

async def reward_fn(record):
    await asyncio.sleep(0.4)
    return len(record.tokens)
"""


@dataclass
class Done:
    """A finished run: its exit code, what it wrote to stderr, and its directory."""

    returncode: int
    stderr: str
    run_dir: Path

    def metrics(self):
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def checkpoints(self):
        return sorted(path.name for path in (self.run_dir / "checkpoints").iterdir())

    def failure(self):
        """The error message of a run that a failing reward has ended."""
        assert self.returncode == 1, self.stderr
        assert "Traceback" not in self.stderr
        return self.stderr[self.stderr.index("error: ") :]


def arguments(tmp_path, checkpoint, reward, *further, algo="grpo", steps=4):
    task = write_task(tmp_path / "task")
    task["reward.py"].write_text(reward)
    options = task_arguments(algo, checkpoint, task, tmp_path / "run")
    return [*map(str, options), "--max-steps", str(steps), "--reward-workers", "2", "--no-shuffle", *map(str, further)]


@pytest.fixture
def run(tmp_path, tiny_checkpoint, capsys):
    """Trains in this process."""

    def train(reward, *further, **options):
        code = main(arguments(tmp_path, tiny_checkpoint, reward, *further, **options))
        return Done(code, capsys.readouterr().err, tmp_path / "run")

    return train


def test_a_reward_that_raises_ends_the_run_with_its_line_and_record(tmp_path, tiny_checkpoint):
    reward = RAISES.replace("% 7 == 3", "== 15")
    process = areno(*arguments(tmp_path, tiny_checkpoint, reward))
    done = Done(process.returncode, process.stderr, tmp_path / "run")
    message = done.failure()
    assert "KeyError: 'no such unit'" in message
    line = 1 + reward.splitlines().index("    if bad(record): raise KeyError('no such unit')")
    assert f"reward.py:{line})" in message
    assert "prompt_index 3, sample_index" in message
    assert "'What is 0 plus 15?'" in message
    assert "--on-reward-error drop" in message
    assert [record["step"] for record in done.metrics()] == [0, 1]
    assert done.checkpoints() == ["step_000002"]


def test_a_reward_that_hangs_ends_the_run_at_its_deadline(run):
    began = time.monotonic()
    message = run(HANGS, "--reward-timeout-s", 1.5).failure()
    assert time.monotonic() - began < 45
    assert "1.5 s" in message
    assert "'What is 0 plus 3?'" in message


def test_a_reward_that_is_not_a_number_is_an_error_and_not_a_zero(run):
    done = run(NAN)
    message = done.failure()
    assert "nan" in message
    assert "'What is 0 plus 3?'" in message
    assert done.checkpoints() == []


def test_a_reward_that_ends_its_process_is_reported_with_the_record(run):
    message = run(EXITS).failure()
    assert "its worker process died (exit code 1)" in message
    assert "'What is 0 plus 3?'" in message


def test_failing_samples_can_be_dropped_and_are_counted(run):
    done = run(RAISES, "--on-reward-error", "drop", steps=2)
    assert done.returncode == 0, done.stderr
    records = done.metrics()
    # Sums 3 and 10 are bad: one of the six prompts of each step, four samples each.
    assert [record["train/reward_errors"] for record in records] == [4.0, 4.0]
    assert [record["rollout/num_sequences"] for record in records] == [20, 20]
    assert all(record["train/grad_norm"] > 0 for record in records)
    assert done.stderr.count("a sample was dropped: KeyError: 'no such unit'") == 8
    dropped = re.findall(
        r"a sample was dropped: .*; prompt_index (\d+), sample_index (\d+)$", done.stderr, re.MULTILINE
    )
    assert sorted(sample for _, sample in dropped) == sorted("0123" * 2), "each record is named"
    assert "the reward function failed on 4 samples" in done.stderr


def test_a_step_without_any_usable_reward_ends_the_run(run):
    message = run("def reward_fn(record):\n    return 1 / 0\n", "--on-reward-error", "drop").failure()
    assert "all rewards of this step failed; first error: ZeroDivisionError" in message


def test_equal_rewards_warn_and_give_exactly_zero_gradients(run, tiny_checkpoint):
    done = run("def reward_fn(record):\n    return 0.1\n", "--weight-decay", 0, algo="gspo", steps=5)
    assert done.returncode == 0, done.stderr
    assert "all rewards are 0.1 for 5 steps: nothing can be learned" in done.stderr
    for record in done.metrics():
        assert record["train/grad_norm"] == 0
        assert record["train/grad_nonzero_count"] == 0
        assert record["train/zero_std_groups"] == 1
    before = load_file(tiny_checkpoint / "model.safetensors")
    after = load_file(done.run_dir / "checkpoints" / "step_000005" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_async_reward_waits_for_many_samples_at_once(run):
    done = run(ASYNC, steps=2)
    assert done.returncode == 0, done.stderr
    for record in done.metrics():
        # 24 samples of 0.4 s each would take 4.8 s on two workers, one after the other.
        assert 0.4 <= record["time/reward"] < 3.0
        assert record["rollout/rewards_mean"] == pytest.approx(record["train/response_len"])
