"""``areno train`` with asynchronous rollout processes, and with workflows."""

from __future__ import annotations

import json
import signal

import pytest

from areno.cli.main import main
from areno.training.checkpoints import rollout_state
from tests.e2e.test_resume import metrics
from tests.support.cli import kill, start, task_arguments, wait_for_text, write_task

WORKFLOW = '''
from areno.rollouts.conversation.trajectory_rows import completion_row
from areno.rollouts.engine_client import ModelRequest
from areno.rollouts.trajectory import make_trajectory
from areno.rollouts.workflows.base import RolloutWorkflow
from areno.text.chat import encode_generation_prompt


class Even(RolloutWorkflow):
    """Rewards even digits, leaves answers of one token out, and fails on one prompt."""

    def __init__(self, gconfig, tokenizer):
        self.gconfig, self.tokenizer = gconfig, tokenizer

    async def arun_episode(self, engine, data):
        if data["prompt"] == "What is 1 plus 3?":
            raise ValueError("no ones")
        prompt = encode_generation_prompt(self.tokenizer, data["prompt"])
        answer = await engine.agenerate(ModelRequest(prompt, self.gconfig))
        text = self.tokenizer.decode(answer.output_tokens_without_stop)
        if len(answer.output_tokens) < 2:
            return None
        return make_trajectory([(completion_row(prompt, answer.sequence), sum(c in "02468" for c in text) / 9)])
'''


@pytest.fixture
def run(tmp_path, tiny_checkpoint, capsys):
    """Runs ``areno train`` in this process; returns the run directory."""
    task = write_task(tmp_path / "task")

    def train(name, *further, workflow=False):
        arguments = task_arguments("gspo", tiny_checkpoint, task, tmp_path / name)
        if workflow:
            place = arguments.index("--reward-fn-path")
            (tmp_path / "even.py").write_text(WORKFLOW)
            arguments[place : place + 2] = ["--workflow", f"{tmp_path / 'even.py'}:Even"]
        else:
            arguments += ["--reward-workers", 1]
        code = main([str(part) for part in (*arguments, *further)])
        assert code == 0, capsys.readouterr().err
        return tmp_path / name

    return train


def column(run_dir, name):
    return [record[name] for record in metrics(run_dir) if name in record]


def test_an_asynchronous_run_without_staleness_equals_the_synchronous_one(run):
    synchronous = run("turns", "--max-steps", 3)
    asynchronous = run("beside", "--max-steps", 3, "--rollout", "async", "--max-staleness", 0)
    assert column(asynchronous, "train/staleness_max") == [0.0] * 3
    for name in ("rollout/rewards_mean", "train/loss", "train/grad_norm"):
        assert column(asynchronous, name) == pytest.approx(column(synchronous, name), rel=1e-4, abs=1e-6)
    samples = [
        [json.loads(line) for line in (p / "samples.jsonl").read_text().splitlines()]
        for p in (synchronous, asynchronous)
    ]
    assert [s["completion"] for s in samples[0]] == [s["completion"] for s in samples[1]]


def test_a_workflow_rewards_its_samples_in_synchronous_and_asynchronous_runs(run, tmp_path):
    (tmp_path / "held_out.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"What is {a} plus 2?"}) for a in range(2, 8))
    )
    options = ("--max-steps", 3, "--eval-dataset-path", tmp_path / "held_out.jsonl", "--eval-interval", 2)
    synchronous = run("turns", *options, workflow=True)
    asynchronous = run("beside", *options, "--rollout", "async", "--max-staleness", 0, workflow=True)
    for name in ("rollout/rewards_mean", "train/grad_norm", "eval/rewards_mean", "train/workflow_left_out"):
        assert column(asynchronous, name) == pytest.approx(column(synchronous, name), rel=1e-4, abs=1e-6)
    samples = [json.loads(line) for line in (synchronous / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        assert sample["reward"] == pytest.approx(sum(c in "02468" for c in sample["completion"]) / 9)
    for run_dir in (synchronous, asynchronous):
        assert column(run_dir, "train/sampling_cut_mass") == [], "trajectories do not contain it"


def test_a_killed_asynchronous_run_trains_every_batch_once_within_its_staleness_bound(tmp_path, tiny_checkpoint):
    task, run_dir = write_task(tmp_path / "task"), tmp_path / "run"
    options = ("--rollout", "async", "--max-staleness", 2, "--rollout-replicas", 2, "--save-interval", 1)
    arguments = task_arguments("grpo", tiny_checkpoint, task, run_dir)
    process = start(*arguments, *options, "--max-steps", 7, "--reward-workers", 1, "--keep-checkpoints", 9)
    wait_for_text(process, "step 3/7")
    assert kill(process) == -signal.SIGKILL
    newest = max((run_dir / "checkpoints").glob("step_*"))
    unused, done = rollout_state(newest), int(newest.name.removeprefix("step_"))
    assert set(unused) <= {done, done + 1, done + 2}
    assert main(["train", "--resume", str(run_dir)]) == 0
    assert [record["step"] for record in metrics(run_dir)] == list(range(7))
    behind = column(run_dir, "train/staleness_max")
    assert behind[0] == 0
    assert 0 < max(behind) <= 2
    # Samples finished before the kill are trained on unchanged, token by token.
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    again = [s for s in samples if s["prompt_index"] in unused.get(s["step"], {})]
    assert again
    for sample in again:
        kept = unused[sample["step"]][sample["prompt_index"]][sample["sample_index"]]
        assert [token for part in sample["rows"][0] if part["trained"] for token in part["tokens"]] == kept[
            "resp_tokens"
        ]
        assert {part["version"] for part in sample["rows"][0] if part["trained"]} == set(kept["versions"])
