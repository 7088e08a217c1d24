"""The documented commands on real GSM8K problems: SFT, then GSPO and GRPO, through ``examples/math``.

The model has about a million parameters, and a tokenizer that is trained on the data. Every run is a separate process;
its results are checked with plain ``transformers`` and TensorBoard.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from areno import ArenoConfig, SamplingParams, Trainer
from tests.support.cli import areno
from tests.support.tiny import save_tiny_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples" / "math"
RL_STEPS, SFT_STEPS = 3, 4
TEMPERATURES = {"gspo": 1.0, "grpo": 0.7}
ROLLOUT_TAGS = [
    "rewards_mean",
    "rewards_std",
    "rewards_max",
    "rewards_min",
    "accuracy",
    "advantages_mean",
    "advantages_std",
    "logprobs_mean",
    "seq_len_mean",
    "prompt_len_mean",
    "response_len_mean",
    "num_sequences",
    "skipped_long",
    "total_skipped_long",
]
TRAIN_TAGS = [
    "loss",
    "policy_loss",
    "total_loss",
    "ratio_mean",
    "ratio_std",
    "grad_norm",
    "lr",
    "rollout_logprobs_mean",
    "train_logprobs_mean",
    "advantage_mean",
    "response_len",
    "logp_diff_mean",
    "logp_abs_diff_mean",
    "grad_zero_ratio",
    "grad_nonzero_ratio",
    "step_rollout_time_s",
    "step_train_time_s",
    "step_e2e_time_s",
]
TIME_TAGS = ["rollout", "reward", "advantage", "train"]


def train(algo, checkpoint, data, run_dir, *further):
    """Run a short version of the documented smoke test; return the run directory."""
    hook = ("dataset_loader.py", "math_verify_reward.py")
    arguments = ["--ckpt", checkpoint, "--dataset-path", data, "--dataset-loader-fn", EXAMPLES / hook[0]]
    if algo != "sft":
        arguments += ["--reward-fn-path", EXAMPLES / hook[1]]
    arguments += ["--algo", algo, "--tp-size", 1, "--world-size", 1, *further, "--run-dir", run_dir]
    done = areno("train", *arguments)
    assert done.returncode == 0, done.stderr
    return run_dir


@pytest.fixture(scope="module")
def runs(gsm8k, tmp_path_factory):
    """SFT on all problems, then one run of each RL algorithm from its checkpoint."""
    root, data = tmp_path_factory.mktemp("gsm8k"), gsm8k / "train.jsonl"
    problems = [json.loads(line) for line in data.read_text().splitlines()]
    texts = [problem[key] for problem in problems[:2000] for key in ("question", "answer")]
    model = save_tiny_checkpoint(root / "model", texts=texts, vocab=1536, hidden=128, layers=4, heads=4)
    sizes = ("--batch-size", 16, "--mini-bs", 4, "--lr", "3e-3", "--max-steps", SFT_STEPS)
    runs = {"sft": train("sft", model, data, root / "sft", *sizes)}
    start = checkpoint_of(runs["sft"], SFT_STEPS)
    for algo, temperature in TEMPERATURES.items():
        short = ("--batch-size", 1, "--max-steps", RL_STEPS, "--max-new-tokens", 24, "--temperature", temperature)
        runs[algo] = train(algo, start, data, root / algo, *short)
    return runs


def checkpoint_of(run_dir, steps):
    return run_dir / "checkpoints" / f"step_{steps:06d}"


def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_every_run_completes_its_steps_and_saves_the_last(runs):
    for algo, run_dir in runs.items():
        steps = SFT_STEPS if algo == "sft" else RL_STEPS
        assert [record["step"] for record in metrics(run_dir)] == list(range(steps))
        assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"step_{steps:06d}"]
        summary = json.loads((run_dir / "summary.json").read_text())
        assert (summary["algo"], summary["steps"]) == (algo, steps)


def test_supervised_training_lowers_the_loss(runs):
    losses = [record["train/loss"] for record in metrics(runs["sft"])]
    assert losses[0] == pytest.approx(math.log(1536), abs=0.5)
    assert losses[-1] < losses[0] - 0.3


def test_the_reward_is_computed_from_the_reference_answers(runs):
    for algo in TEMPERATURES:
        samples = [json.loads(line) for line in (runs[algo] / "samples.jsonl").read_text().splitlines()]
        assert {sample["step"] for sample in samples} == set(range(RL_STEPS))
        assert {sample["reward"] for sample in samples} <= {0.0, 1.0}
        assert all("put the final answer within \\boxed{}" in sample["prompt"] for sample in samples)


@pytest.mark.parametrize("algo", TEMPERATURES)
def test_rollout_and_training_agree_on_the_log_probabilities(runs, algo):
    gaps = [record["train/logp_abs_diff_mean"] for record in metrics(runs[algo])]
    assert len(gaps) == RL_STEPS
    assert max(gaps) < 1e-5


@pytest.mark.parametrize("algo", TEMPERATURES)
def test_tensorboard_has_the_documented_tags_at_every_step(runs, algo):
    events = EventAccumulator(str(runs[algo] / "events"))
    events.Reload()
    wanted = {
        *(f"rollout/{name}" for name in ROLLOUT_TAGS),
        *(f"train/{name}" for name in TRAIN_TAGS),
        *(f"time/{name}" for name in TIME_TAGS),
    }
    assert wanted <= set(events.Tags()["scalars"])
    recorded = metrics(runs[algo])
    for tag in wanted:
        scalars = events.Scalars(tag)
        assert [scalar.step for scalar in scalars] == list(range(RL_STEPS))
        assert [scalar.value for scalar in scalars] == pytest.approx([record[tag] for record in recorded], rel=1e-5)


@pytest.mark.parametrize("algo", ["gspo", "grpo"])
def test_greedy_text_of_the_checkpoint_equals_that_of_transformers(runs, gsm8k, algo):
    folder = checkpoint_of(runs[algo], RL_STEPS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    questions = [json.loads(line)["question"] for line in (gsm8k / "test.jsonl").read_text().splitlines()[:2]]
    chats = [[{"role": "user", "content": question}] for question in [*questions, "1+1?"]]
    encoded = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    assert len({len(ids) for ids in encoded}) == 3
    expected = []
    for ids in encoded:
        with torch.inference_mode():
            output = plain.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=24)
        expected.append(output[0, len(ids) :].tolist())
    sampling = SamplingParams(greedy=True, max_new_tokens=24)
    with Trainer(1, str(folder), custom_config=ArenoConfig(runtime={"device": "cpu"})) as trainer:
        trainer.init()
        with trainer.rollout_session(sampling_params=sampling, proxy=False):
            batched = trainer.rollout_token_batch(encoded, 1, sampling)
            alone = trainer.rollout_token_batch(encoded[:1], 1, sampling)
    assert [result.sequences[0].resp_tokens for result in batched] == expected
    assert alone[0].sequences[0].resp_tokens == expected[0]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]
    assert [result.sequences[0].text for result in batched] == texts
