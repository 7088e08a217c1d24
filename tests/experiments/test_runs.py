"""Whole experiments with real rollout processes: training rows, their staleness, and equality with a plain loop."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areno.config.experiment import GRPOConfig
from areno.config.experiment.loader import load_expr_config
from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.engine.rollout.counter_rng import derive_seed
from areno.engine.train.optimizer import OptimizerOptions
from areno.experiments.trainers import PPOTrainer
from areno.text.chat import encode_generation_prompt
from areno.training.checkpoints import rollout_state
from areno.types import Request, SamplingParams, TrainSequence
from examples.experiments.toy import letter_reward
from tests.experiments.runs import Task, make_task, settings


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return make_task(tmp_path_factory.mktemp("task"))


class Watched(PPOTrainer):
    """Keeps its batches, and the episode events of its dispatcher."""

    def __init__(self, *arguments: Any) -> None:
        self.batches: list[Any] = []
        self.events: list[tuple[int, str, str, int]] = []
        self.loaded: dict[str, Any] | None = None
        super().__init__(*arguments)
        take = self.dispatcher.prepare_batch

        def prepare_batch(*given: Any) -> Any:
            self.batches.append(take(*given))
            return self.batches[-1]

        self.dispatcher.prepare_batch = prepare_batch  # type: ignore[method-assign]

    def _trace_episode(self, task: int, status: str, reason: str) -> None:
        self.events.append((task, status, reason, self.dispatcher.version))
        super()._trace_episode(task, status, reason)

    def load_part_states(self, parts: dict[str, Any], checkpoint: Path) -> None:
        self.loaded = rollout_state(checkpoint)
        super().load_part_states(parts, checkpoint)


@pytest.fixture
def train(task: Task, tmp_path: Path) -> Iterator[Any]:
    threads = torch.get_num_threads()

    def run(**changes: Any) -> Watched:
        (tmp_path / "file.yaml").write_text("{}\n")
        argv = ["--config", str(tmp_path / "file.yaml"), *settings(task, tmp_path / "files", **changes)]
        with Watched(load_expr_config(argv, GRPOConfig)[0]) as trainer:
            trainer.train()
        return trainer

    yield run
    torch.set_num_threads(threads)


# -- synchronous training ----------------------------------------------------------------------------------------------

EQUAL_STEPS = 5


def rows_of(task: Task) -> list[dict[str, str]]:
    return [{"prompt": prompt, "letter": prompt[4]} for prompt in task.prompts]


def loss(pack: Any, logprobs: torch.Tensor) -> torch.Tensor:
    """The policy gradient with importance weights: on fresh samples no weight is clipped."""
    mask = pack["packed_response_mask"].to(logprobs.dtype)
    weights = (logprobs - pack["packed_logprobs"]).exp()
    return -(pack["packed_advantages"] * weights * mask).sum() / mask.sum()


def plain_loop(task: Task, folder: Path) -> list[list[tuple[int, list[int]]]]:
    """Generate, reward, train, in one process and in this order; returns episode and tokens of each row of each step.

    Adam's eps is far above rounding errors, so that it does not amplify those of gradients near 0.
    """
    optimizer = OptimizerOptions(lr=0.003, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.0, grad_clip_norm=1.0)
    engine = Engine(str(task.model), EngineConfig(optimizer=optimizer, decode="eager", kv_cache_tokens=8192))
    rows, steps = rows_of(task), []
    for step in range(EQUAL_STEPS):
        episodes = list(range(4 * step, 4 * step + 4))
        groups = {}
        for episode in episodes:
            row = rows[episode]
            prompt = encode_generation_prompt(engine.tokenizer, row["prompt"], disable_thinking=True)
            seeds = [derive_seed(1, episode, sample, 0) for sample in range(2)]
            answers = engine.submit([Request(prompt, SamplingParams(max_new_tokens=8), seeds)])[0].result(60).sequences
            groups[episode] = (prompt, row, answers)
        random.Random(derive_seed(1, step)).shuffle(episodes)
        batch, samples = [], []
        for group, episode in enumerate(episodes):
            prompt, row, answers = groups[episode]
            rewards = [reward_of(engine.tokenizer, row, answer) for answer in answers]
            for answer, reward in zip(answers, rewards, strict=True):
                tokens = [*prompt, *answer.resp_tokens]
                advantage = reward - sum(rewards) / len(rewards)
                given = [True] * len(prompt) + [False] * len(answer.resp_tokens)
                batch.append(
                    TrainSequence(
                        prompt_mask=given,
                        tokens=tokens,
                        logprobs=[0.0] * len(prompt) + answer.resp_logprobs,
                        advantages=[0.0 if g else advantage for g in given],
                        group=group,
                    )
                )
                samples.append((episode, tokens))
        steps.append(samples)
        engine.train(batch, loss, len(batch))
    engine.save_model(folder)
    engine.close()
    return steps


def reward_of(tokenizer: Any, row: dict[str, str], answer: Any) -> float:
    tokens = answer.resp_tokens[:-1] if answer.finish_reason == "stop" else answer.resp_tokens
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return letter_reward(row["prompt"], text, [], [], letter=row["letter"])


@pytest.mark.parametrize(
    "rollout",
    [
        pytest.param({"backend": "areno:d2"}, id="two replicas"),
        pytest.param(
            {"scheduling_strategy": {"type": "colocation", "target": "actor", "fork": False}}, id="one process in turn"
        ),
    ],
)
def test_without_staleness_a_run_equals_a_plain_loop(task, train, tmp_path, rollout):
    """Rows, tokens and weights equal those of ``plain_loop``, which computes advantages by hand."""
    trainer = train(
        **{f"rollout__{name}": value for name, value in rollout.items()},
        seed=1,
        train_dataset__shuffle=False,
        rollout__max_head_offpolicyness=0,
        total_train_steps=EQUAL_STEPS,
        saver__freq_steps=1,
        actor__reward_norm__mean_level="group",
        actor__reward_norm__std_level=None,
        actor__optimizer__beta2=0.999,
        actor__optimizer__eps=1e-3,
    )
    expected = plain_loop(task, tmp_path / "plain")
    mine = []
    for step, batch in enumerate(trainer.batches):
        assert batch.version == step
        assert batch.staleness == [0] * 4
        samples = []
        for episode, trajectory in zip(batch.task_ids, batch.trajectories, strict=True):
            for ids, keep, versions in zip(
                trajectory["input_ids"], trajectory["attention_mask"], trajectory["versions"], strict=True
            ):
                samples.append((episode, ids[keep].tolist()))
                assert {v for v in versions.tolist() if v >= 0} == {step}
        mine.append(samples)
    assert mine == expected
    last = f"epoch0epochstep{EQUAL_STEPS - 1}globalstep{EQUAL_STEPS - 1}"
    trained = load_file(trainer.folders.checkpoints / "default" / last / "model.safetensors")
    plain, initial = load_file(tmp_path / "plain/model.safetensors"), load_file(task.model / "model.safetensors")
    assert trained.keys() == plain.keys()
    apart = max(float((trained[name] - plain[name]).abs().max()) for name in plain)
    assert apart <= 1e-6
    assert max(float((initial[name] - plain[name]).abs().max()) for name in plain) > 1e-3


# -- versions and staleness --------------------------------------------------------------------------------------------


def logprobs_of(model: Any, tokens: list[int]) -> list[float]:
    with torch.no_grad():
        table = model(input_ids=torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    return [0.0] + [float(table[place, token]) for place, token in enumerate(tokens[1:])]


def weights_of(trainer: Watched, task: Task) -> dict[int, Path]:
    """Checkpoint of each version."""
    found = {0: task.model}
    for path in (trainer.folders.checkpoints / "default").glob("epoch*"):
        found[int(path.name.rpartition("globalstep")[2]) + 1] = path
    return found


LONG = {
    "gconfig__max_new_tokens": 120,
    "gconfig__max_tokens": 256,
    "gconfig__ignore_eos": True,
    "rollout__max_head_offpolicyness": 4,
    "rollout__max_concurrent_rollouts": 24,
    "total_train_steps": 10,
}


def test_each_token_has_the_version_whose_weights_sampled_it(task, train):
    """Weights change during answers; every log-prob is recomputed from the checkpoint of its version."""
    trainer = train(**LONG, saver__freq_steps=1, rollout__backend="areno:d2")
    weights, samples = weights_of(trainer, task), []
    for batch in trainer.batches:
        for trajectory in batch.trajectories:
            for index in range(len(trajectory["rewards"])):
                row = {name: trajectory[name][index].tolist() for name in ("input_ids", "versions", "logprobs")}
                samples.append((batch.version, row))
    mixed = [row for _, row in samples if len({v for v in row["versions"] if v >= 0}) > 1]
    assert len(mixed) >= 4, "no answer spans an update"
    for version, row in samples:
        sampled = [v for v in row["versions"] if v >= 0]
        assert sampled == sorted(sampled)
        assert sampled[-1] <= version
    for version, path in weights.items():
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
        for row in [row for _, row in samples if version in row["versions"]][:24]:
            wanted = logprobs_of(model, row["input_ids"])
            for place, stamped in enumerate(row["versions"]):
                if stamped == version:
                    assert row["logprobs"][place] == pytest.approx(wanted[place], abs=2e-4)


def check_capacity(trainer: Watched, eta: int, limit: int, batch: int = 4) -> None:
    """Count episodes from their events, and check the counts against the formula whenever an episode starts."""
    state = trainer.loaded or {"version": 0, "finished": []}
    running, accepted = 0, state["version"] * batch + len(state["finished"])
    for _, status, _, version in trainer.events:
        if status == "running":
            running += 1
            assert running <= limit
            assert running + accepted <= (eta + version + 1) * batch
        elif status == "dropped":
            accepted -= 1
        else:
            running -= 1
            accepted += status == "accepted"


@pytest.mark.parametrize("on_stale", ["regenerate", pytest.param("drop", marks=pytest.mark.long)])
def test_the_exact_bound_holds_and_capacity_is_never_exceeded(train, on_stale):
    trainer = train(**LONG, rollout__max_staleness=1, rollout__on_stale=on_stale)
    for batch in trainer.batches:
        for trajectory in batch.trajectories:
            versions = trajectory["versions"]
            assert int(versions[versions >= 0].min()) >= batch.version - 1
    dropped = [episode for episode, status, *_ in trainer.events if status == "dropped"]
    assert dropped, "nothing became too old, so the bound was not needed"
    assert trainer.dispatcher.statistics()["stale"] == len(dropped)
    begun = Counter(episode for episode, status, *_ in trainer.events if status == "running")
    if on_stale == "drop":
        assert set(begun.values()) == {1}
        assert not set(dropped) & {episode for batch in trainer.batches for episode in batch.task_ids}
    else:
        assert max(begun.values()) > 1
    used = [episode for batch in trainer.batches for episode in batch.task_ids]
    assert len(set(used)) == len(used) == 40
    check_capacity(trainer, 4, 24)


@pytest.mark.long
def test_a_recovery_does_not_let_more_episodes_begin(train):
    first = train(**{**LONG, "total_train_steps": 4})
    again = train(**{**LONG, "total_train_steps": 8})
    assert again.loaded is not None
    assert again.loaded["version"] == 4
    assert again.loaded["finished"] or again.loaded["waiting"]
    check_capacity(first, 4, 24)
    check_capacity(again, 4, 24)
    used = [episode for trainer in (first, again) for batch in trainer.batches for episode in batch.task_ids]
    assert len(set(used)) == len(used) == 32
