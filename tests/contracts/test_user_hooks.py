"""Every hook for a user's code, called through the real entry points: what it receives and what it may return."""

from __future__ import annotations

import functools
import json

import pytest

import areno
from areno import ArenoConfig, SamplingParams, Trainer, TrainSequence
from areno.api.backend import base as backends
from areno.cli.main import main
from areno.config import advantages, algorithms
from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.loss_fns import reduces_over
from tests.support.cli import task_arguments, write_task


@pytest.fixture
def task(tmp_path):
    return write_task(tmp_path / "task", rows=12)


def train(algo, checkpoint, task, run, *more):
    code = main([str(part) for part in (*task_arguments(algo, checkpoint, task, run), "--max-steps", 2, *more)])
    assert code == 0
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_reward_function_gets_a_record_with_everything_about_the_answer(tmp_path, tiny_checkpoint, task):
    task["reward.py"].write_text(
        "import json\n"
        "def reward_fn(record):\n"
        f"    with open({str(tmp_path / 'seen.jsonl')!r}, 'a') as out:\n"
        "        out.write(json.dumps([record.prompt, record.completion, record.answer, record.source_record,\n"
        "            len(record.tokens), len(record.logprobs), len(record.loss_mask), record.metadata]) + '\\n')\n"
        "    return record.metadata['sample_index']\n"
    )
    train("grpo", tiny_checkpoint, task, tmp_path / "run")
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert len(seen) == 2 * 6 * 4
    rows = {row["prompt"]: row for row in map(json.loads, task["data.jsonl"].read_text().splitlines())}
    for prompt, completion, answer, source, tokens, logprobs, mask, metadata in seen:
        assert source == rows[prompt]
        assert answer == rows[prompt]["solutions"]
        assert isinstance(completion, str)
        assert 1 <= tokens == logprobs == mask <= 12
        assert {"prompt_index", "sample_index", "finish_reason"} <= metadata.keys()


def test_a_loader_gets_the_path_and_the_three_readers(tmp_path, tiny_checkpoint, task):
    task["loader.py"].write_text(
        "def load_training_dataset(path, *, default_loader, load_dataset, load_from_disk):\n"
        "    assert callable(load_dataset) and callable(load_from_disk)\n"
        "    return [{'prompt': row['prompt'], 'solutions': ['of the loader']} for row in default_loader(path)][:6]\n"
    )
    task["reward.py"].write_text("def reward_fn(record):\n    return float(record.answer == ['of the loader'])\n")
    metrics = train("grpo", tiny_checkpoint, task, tmp_path / "run", "--dataset-loader-fn", task["loader.py"])
    assert [step["rollout/rewards_mean"] for step in metrics] == [1.0, 1.0]


ADVANTAGE = """
def ranks(rewards, groups):
    assert len(rewards) == len(groups) == 24 and sorted(set(groups)) == [0, 1, 2, 3, 4, 5]
    return [2.5 if index == 0 else 0.0 for index in range(len(rewards))]
"""


def test_an_advantage_function_in_a_file_is_used(tmp_path, tiny_checkpoint, task):
    (tmp_path / "own.py").write_text(ADVANTAGE)
    task["reward.py"].write_text("def reward_fn(record):\n    return record.metadata['sample_index']\n")
    metrics = train("gspo", tiny_checkpoint, task, tmp_path / "run", "--advantage", f"{tmp_path / 'own.py'}:ranks")
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    advantages_of_first_step = {sample["advantage"] for sample in samples if sample["step"] == 0}
    assert advantages_of_first_step == {2.5, 0.0}
    assert metrics[0]["train/policy_loss"] == pytest.approx(-2.5 / 24, rel=1e-4)  # ratio 1, one answer of 24


def test_an_estimator_that_a_program_registers_can_be_used_by_name(tmp_path, tiny_checkpoint, task, monkeypatch):
    monkeypatch.setattr(advantages, "_REGISTRY", dict(advantages._REGISTRY))
    areno.register_advantage("all_one", lambda rewards, groups: [1.0] * len(rewards))
    assert "all_one" in areno.list_advantages()
    metrics = train("grpo", tiny_checkpoint, task, tmp_path / "run", "--advantage", "all_one")
    assert metrics[0]["train/advantage_mean"] == 1.0
    with pytest.raises(ValueError, match="all_one"):
        areno.register_advantage("all_one", lambda rewards, groups: [])


ALGORITHM = """
from dataclasses import dataclass
from areno.api import AlgorithmSpec
from areno.config import option

@dataclass
class Options:
    scale: float = option(1.0, above=0, help="Factor on the loss.")

def loss(data_pack, logprobs):
    return -(logprobs * data_pack["packed_advantages"]).mean()

def make(options):
    scale = options.extra["scale"]
    return lambda pack, logprobs: (scale * loss(pack, logprobs), {"scale": scale})

OWN = AlgorithmSpec("own", "areno.api.trainers.policy_only:PolicyOnlyTrainer", None, True, make, options=Options)
"""


def test_an_algorithm_in_a_file_has_its_own_loss_and_options(tmp_path, tiny_checkpoint, task):
    (tmp_path / "own.py").write_text(ALGORITHM)
    spec = f"{tmp_path / 'own.py'}:OWN"
    metrics = train(spec, tiny_checkpoint, task, tmp_path / "run", "--scale", "3")
    assert [step["train/scale"] for step in metrics] == [3.0, 3.0]


def test_an_algorithm_that_a_program_registers_can_be_used_by_name(tmp_path, tiny_checkpoint, task, monkeypatch):
    monkeypatch.setattr(algorithms, "_REGISTRY", dict(algorithms._REGISTRY))
    called = []

    @reduces_over("sequence")
    def loss(data_pack, logprobs):
        called.append(data_pack["packed_num_sequences"])
        return -logprobs.mean()

    spec = areno.AlgorithmSpec("mine", "areno.api.trainers.policy_only:PolicyOnlyTrainer", loss, True)
    areno.register_algorithm(spec)
    train("mine", tiny_checkpoint, task, tmp_path / "run")
    assert sum(called) == 2 * 24


def test_the_trainer_can_use_a_custom_backend(tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(backends, "_REGISTRY", dict(backends._REGISTRY))
    calls = []

    class Counting(Engine):
        def train(self, *arguments):
            calls.append("train")
            return super().train(*arguments)

        def submit(self, requests):
            calls.append(f"submit {sum(request.n for request in requests)}")
            return super().submit(requests)

    def prepare(model_path, world_size, config):
        return lambda: Counting(model_path, EngineConfig(max_running=config.max_running_prompts))

    monkeypatch.setattr(backends, "prepare_counting", prepare, raising=False)
    areno.register_backend(areno.BackendType("counting", ArenoConfig, "areno.api.backend.base:prepare_counting"))
    sampling = SamplingParams(max_new_tokens=4)
    with Trainer(1, str(tiny_checkpoint), "counting", ArenoConfig()) as trainer:
        trainer.init()
        with trainer.rollout_session(sampling_params=sampling, proxy=False):
            trainer.rollout_token_batch([[5, 6]], 3, sampling)
        trainer.train([TrainSequence([True, False], [5, 6])], areno.sft_loss_fn)
    assert calls == ["submit 3", "train"]
    with pytest.raises(TypeError, match="requires its typed configuration ArenoConfig, got dict"):
        Trainer(1, str(tiny_checkpoint), "counting", {})


@pytest.mark.parametrize(
    "make",
    [
        lambda: lambda pack, logprobs: -logprobs.sum() / 2,
        lambda: functools.partial(areno.grpo_loss_fn, clip_eps=0.1),
        lambda: (lambda scale: lambda pack, logprobs: (-scale * logprobs.sum(), {"scale": scale}))(0.5),
    ],
    ids=["lambda", "partial", "closure"],
)
def test_any_callable_can_be_a_loss(tiny_checkpoint, make):
    with Trainer(1, str(tiny_checkpoint)) as trainer:
        trainer.init()
        row = TrainSequence([True, False, False], [5, 6, 7], logprobs=[0.0, -6.0, -6.0], advantages=[0.0, 1.0, 1.0])
        assert trainer.train([row], make())["grad_norm"] > 0
        with pytest.raises(TypeError, match="loss_fn must be callable, got str"):
            trainer.train([row], "grpo")
