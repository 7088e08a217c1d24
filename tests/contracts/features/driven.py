"""What a run did and wrote, in terms that both front ends share, and the evidence for each feature."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areno.cache_folder import cache_folder
from areno.engine.engine import EngineConfig
from areno.engine.parallel.layout import Layout
from areno.observability.display import LiveProgress
from areno.spec import RunSpec
from areno.training.frequency import StepInfo
from areno.training.loop import TrainingLoop
from areno.training.objectives.policy import PolicyObjective
from areno.training.objectives.reference import CACHE_KIND

STEP = 6
"""Rows of an SFT step, unless a run sets another number."""
ROWS = 12


@dataclass
class Driven:
    """A recorded run.

    Attributes:
        loops: training loop of each attempt; the last one counts.
        engines: configuration and layout of each engine that the process created.
        paths: paths of the models of these engines.
        calls: rows and microbatching of each optimizer step of the actor.
        losses: names of the losses of these steps.
        knobs: keyword arguments of these losses.
        rows: number of rows that each step trained on.
        staged: number of models that were copied, to be saved in the background.
        scored: roles that scored rows.
        replicas: number of rollout replicas, which run in their own processes.
        root: folder of everything that the run wrote.
        code: exit status of the last command.
        output: what the commands printed.
    """

    loops: list[TrainingLoop] = field(default_factory=list)
    engines: list[tuple[EngineConfig, Layout]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    calls: list[tuple[int, Any]] = field(default_factory=list)
    losses: set[str] = field(default_factory=set)
    knobs: dict[str, Any] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    staged: int = 0
    scored: set[str] = field(default_factory=set)
    replicas: int = 0
    root: Path = Path()
    code: int = 0
    output: str = ""

    @property
    def loop(self) -> TrainingLoop:
        return self.loops[-1]

    @property
    def spec(self) -> RunSpec:
        return self.loop.spec

    @property
    def engine(self) -> EngineConfig:
        return self.engines[0][0]

    @property
    def layout(self) -> Layout:
        return self.engines[0][1]

    @property
    def done(self) -> int:
        """Completed steps."""
        return self.loop.state.step

    @property
    def folder(self) -> Path:
        return self.loop.report.run_dir.path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    def column(self, *endings: str) -> list[float]:
        """Values of the metrics whose names end with one of ``endings``, line by line."""
        return [line[name] for line in self.metrics for name in line if name.endswith(endings)]

    def mean_part(self, name: str) -> float:
        """The mean of a reward part in the first step."""
        return self.column(f"reward_parts/{name}", f"reward_parts/{name}/avg")[0]

    @property
    def objective(self) -> PolicyObjective:
        trainer: Any = self.loop
        return trainer.objective

    def checkpoints(self, kind: str = "step_*") -> list[Path]:
        return sorted(self.spec.checkpoints.folder.glob(kind))

    @property
    def models(self) -> list[Path]:
        """Models that were saved in addition to checkpoints."""
        saver = self.loop.saver
        return [] if saver is None else list(saver.path("default", StepInfo(0, 0, 0, 1, 1)).parent.iterdir())

    @property
    def log(self) -> str:
        return "".join(path.read_text(encoding="utf-8") for path in self.folder.glob("*.log")) + "".join(
            path.read_text(encoding="utf-8") for path in self.folder.glob("log.txt")
        )


REWARD = ("reward_mean", "task_reward/avg")
EVIDENCE: dict[str, Callable[[Driven], bool]] = {
    "passes over the data": lambda run: run.done == 2 * ROWS // STEP and run.loop.state.epoch >= 1,
    "maximum steps": lambda run: run.done == run.spec.span.steps == 1,
    "maximum trained sequences": lambda run: run.spec.span.sequences == run.loop.state.sequences,
    "rows of a step": lambda run: run.calls[0][0] == 4,
    "size of a microbatch": lambda run: run.calls[0][1] == 3 or run.calls[0][1].max_tokens_per_mb == 96,
    "optimizer steps per pass over a rollout": lambda run: (
        len({rows for rows, _ in run.calls}) == 1 and run.calls[0][0] == 4
    ),
    "passes over a rollout": lambda run: sum(rows for rows, _ in run.calls) == 2 * sum(run.rows),
    "algorithm by name or from your own file": lambda run: run.losses == {"gmpo_loss_fn"},
    "KL in the loss": lambda run: "ref" in run.scored and any(run.column("kl_loss", "kl_loss/avg")),
    "KL in the reward": lambda run: "ref" in run.scored and run.column("kl_reward_mean", "kl_rewards/avg") != [],
    "reward function": lambda run: run.column(*REWARD) != [] and "reward" not in run.scored,
    "weights of a reward's parts": lambda run: (
        abs(run.column(*REWARD)[0] - run.mean_part("digits") - 0.1 * run.mean_part("length")) < 1e-5
    ),
    "normalized parts of a reward": lambda run: run.objective.settings.shaping.part_weights == {"length": 0.1},
    "reward model": lambda run: run.column(*REWARD) != [] and "reward" in run.scored,
    "shared prompts computed once in training": lambda run: (
        run.engine.tree_training or getattr(run.calls[0][1], "tree", False)
    ),
    "8-bit Adam": lambda run: run.engine.optimizer.adam_8bit,
    "a model in a GGUF file": lambda run: {Path(path).suffix for path in run.paths} == {".gguf"},
    "LoRA": lambda run: run.engine.adapter is not None and run.engine.adapter.rank == 4,
    "LoRA on a 4-bit base": lambda run: run.engine.adapter is not None and run.engine.adapter.load_in_4bit,
    "recomputed activations": lambda run: run.engine.activation_checkpointing is True,
    "several devices": lambda run: run.layout.world_size == 2,
    "weights sharded across replicas (FSDP2)": lambda run: run.layout.fsdp,
    "speculative decoding": lambda run: any(config.speculate == 2 for config, _ in run.engines),
    "routing replay": lambda run: run.column("routed_experts_changed") != [],
    "configurable policy loss (DAPO, CISPO, SAPO, M2PO, IcePop)": lambda run: run.knobs["knobs"].eps_clip_higher == 0.3,
    "label smoothing of DPO": lambda run: run.knobs["label_smoothing"] == 0.1,
    "disk cache for the log-probs of DPO's reference": lambda run: (
        run.losses == {"dpo_loss_fn"} and any(cache_folder(CACHE_KIND).iterdir())
    ),
    "preference training without a reference (SimPO)": lambda run: run.losses == {"simpo_loss_fn"} and not run.scored,
    "asynchronous rollout": lambda run: max(run.column("staleness/max", "staleness_max"), default=0) == 1,
    "rollout replicas": lambda run: run.replicas == 2,
    "alternating generation and training on the same devices": lambda run: (
        run.replicas == 0 and run.column(*REWARD) != []
    ),
    "workflows": lambda run: {*run.column(*REWARD)} == {0.25},
    "handling of failing rewards": lambda run: sum(run.column("reward_errors", "rollout/failed")) > 0 < run.done,
    "agents": lambda run: {*run.column("agent_turns_mean", "num_turns/avg")} == {3.0},
    "evaluation": lambda run: (run.loop.state.evaluation or {"step": -1})["step"] == run.done,
    "evaluation before training": lambda run: (run.loop.state.best or {"step": -1})["step"] == 0,
    "best checkpoint": lambda run: run.checkpoints("best") != [],
    "early stopping": lambda run: 0 < run.done < run.loop.total_steps() and run.loop.state.not_best == 2,
    "checkpoints to resume from": lambda run: len(run.checkpoints()) >= 2 and run.spec.checkpoints.every.steps == 1,
    "checkpoints at time intervals": lambda run: (
        len(run.checkpoints()) >= 2 and bool(run.spec.checkpoints.every.seconds)
    ),
    "models saved without training state": lambda run: len(run.models) >= 2,
    "saving in the background": lambda run: run.staged == len(run.models) > 0,
    "traces": lambda run: (run.folder / "perf_tracer" / "trainer" / "traces-r0.jsonl").exists(),
    "warnings about runs that cannot learn": lambda run: "all rewards" in run.log and "WARNING" in run.log,
    "live display on a terminal": lambda run: isinstance(run.loop.display, LiveProgress),
    "saved training rows": lambda run: any(run.root.rglob("rollouts/step_*.safetensors")),
    "TensorBoard": lambda run: any((run.root / "tb").rglob("events*")),
    "W&B, SwanLab, Trackio, MLflow": lambda run: any(run.root.rglob("*.wandb")),
    "dry run": lambda run: "max_new_tokens" in run.output and not (run.loops or run.engines),
    "memory plan before a run (`areno plan`)": lambda run: "optimizer" in run.output and not run.loops,
    "concurrency and batch sizes tuned to the free memory": lambda run: (
        "max_concurrent_rollouts=" in run.output or "auto tune chose" in run.log
    ),
    "exact resume": lambda run: (
        run.loops[-1].resumed_from is not None and [line["step"] for line in run.metrics] == [0, 1, 2]
    ),
    "saving on Ctrl-C, SIGTERM and SIGHUP": lambda run: len(run.loops) == 2 and run.loops[0].state.step == 1,
}
"""The evidence for each feature, by its name in docs/front-ends.md."""


def shows(run: Driven, feature: str) -> bool:
    """Whether a run shows a feature; it does not if the evidence is missing."""
    try:
        return bool(EVIDENCE[feature](run))
    except (AttributeError, IndexError, KeyError):
        return False
