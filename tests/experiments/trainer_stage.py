"""Shared by tests of settings: small experiments whose rollout engine lives in the test process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

import areno  # noqa: F401  (before torch)
from areno.config.experiment import DPOConfig, GRPOConfig, RWConfig, SFTConfig, config_from
from areno.engine.engine import Engine
from areno.experiments.run_experiment import trainer_class
from areno.experiments.trainers import PPOTrainer
from areno.rollouts.fleet.weight_transfer import UpdateReport
from areno.rollouts.trajectory import samples_of
from tests.config.experiment.samples import changed

CLASSES = {"rl": GRPOConfig, "sft": SFTConfig, "rw": RWConfig, "dpo": DPOConfig}
PROMPTS = [{"prompt": f"What is {a} plus {a}?", "answer": str(2 * a)} for a in range(12)]
ANSWERED = [
    {**row, "response": f"It is {row['answer']}." + " The answer is this." * (number % 3)}
    for number, row in enumerate(PROMPTS)
]
PAIRS = [{"prompt": row["prompt"], "chosen": "It is even.", "rejected": "Who knows?"} for row in PROMPTS]
ROWS = {"rl": PROMPTS, "sft": ANSWERED, "rw": PAIRS, "dpo": PAIRS}


def settings_of_kind(kind: str, checkpoint: Path, root: Path, changes: dict[str, Any]) -> Any:
    """A checked configuration; ``changes`` has settings by dotted name."""
    root.mkdir(parents=True, exist_ok=True)
    data = root / f"{kind}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS[kind]), encoding="utf-8")
    tree: dict[str, Any] = {
        "experiment_name": "toy",
        "trial_name": "t",
        "total_train_steps": 2,
        "cluster": {"fileroot": str(root / "runs")},
        "train_dataset": {"path": str(data), "type": kind, "batch_size": 4},
        "actor": {
            "path": str(checkpoint),
            "backend": "fsdp:d1",
            "optimizer": {"lr": 0.01, "weight_decay": 0.0},
            "mb_spec": {"max_tokens_per_mb": 512},
        },
    }
    if kind == "rw":
        tree["actor"]["is_critic"] = True
    if kind == "rl":
        tree |= {
            "gconfig": {"n_samples": 2, "max_new_tokens": 6, "max_tokens": 128},
            "rollout": {"backend": "areno:d1"},
            "reward": {"fn": "tests.experiments.plain_rewards.letters", "max_workers": 1},
        }
        tree["actor"] |= {"ppo_n_minibatches": 1, "reward_norm": {"mean_level": "group", "std_level": "group"}}
    return config_from(changed(tree, changes), CLASSES[kind])


class InProcessFleet:
    """One engine in this process in place of replica processes; weights are copied."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.version = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def update_weights(self, trainer: Engine, version: int) -> UpdateReport:
        with self._engine.loop.weights_changing(version), torch.no_grad():
            self._engine.actor.model.module.load_state_dict(trainer.actor.model.module.state_dict())
        self.version = version
        return UpdateReport(version, "shm", 0, 0.0)


class InProcessTrainer(PPOTrainer):
    """The PPO trainer, except that its replica lives in this process."""

    def _start_fleet(self) -> Any:
        path, config = self.rollout_engine()
        return InProcessFleet(Engine(path, config))


class Run:
    """A finished experiment: its statistics by step, its folder, and its final weights."""

    def __init__(self, trainer: Any) -> None:
        self.records: list[dict[str, Any]] = list(trainer.run_dir.read_metrics())
        self.folder: Path = trainer.run_dir.path
        self.checkpoints: Path = trainer.folders.checkpoints
        self.trainer = trainer
        engine = trainer.engine
        self.weights: dict[str, torch.Tensor] = {}
        if isinstance(engine, Engine):
            state = engine.actor.model.module.state_dict()
            self.weights = {name: value.detach().clone() for name, value in state.items()}

    @property
    def steps(self) -> int:
        return len([record for record in self.records if record.get("step", -1) >= 0])

    def column(self, name: str) -> list[float]:
        """A statistic of every step that has it."""
        return [record[name] for record in self.records if name in record]

    def saved(self) -> list[int]:
        """Global steps of the models that were kept."""
        names = (path.name for path in (self.checkpoints / "default").glob("epoch*"))
        return sorted(int(name.rpartition("globalstep")[2]) for name in names)


class RolloutRun(Run):
    """A run with the batches that it trained on."""

    batches: list[Any]

    @property
    def samples(self) -> list[dict[str, Any]]:
        return [row for batch in self.batches for t in batch.trajectories for row in samples_of(t)]

    def answers(self) -> list[list[int]]:
        """Sampled tokens of each sample."""
        return [
            [token for token, trained in zip(row["input_ids"], row["loss_mask"], strict=True) if trained]
            for row in self.samples
        ]


def trainer_of(config: Any, rows: Sequence[Any] | None = None) -> Any:
    kind = trainer_class(config)
    return (InProcessTrainer if kind is PPOTrainer else kind)(config, rows)


def run_kind(kind: str, checkpoint: Path, root: Path, changes: dict[str, Any] | None = None) -> Run:
    """Run an experiment to its end."""
    with trainer_of(settings_of_kind(kind, checkpoint, root, changes or {})) as trainer:
        trainer.train()
        return Run(trainer)


def differ(one: Run, other: Run) -> bool:
    """Whether two runs have ended with different weights."""
    return any(not torch.equal(value, other.weights[name]) for name, value in one.weights.items())
