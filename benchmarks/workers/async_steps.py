"""One side of ``async_vs_sync.py``: a GRPO experiment with tools that take their time. Prints one JSON line."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import areno  # noqa: F401  (before torch, as the command line does: it sets how OpenMP threads wait)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tool_latency import Latency

from areno.config.experiment import GRPOConfig, load_expr_config
from areno.experiments.trainers import PPOTrainer
from areno.rollouts.conversation.trajectory_rows import TrajectoryRow
from areno.rollouts.engine_client import EPISODE, EngineClient, ModelRequest
from areno.rollouts.trajectory import make_trajectory
from areno.rollouts.workflows.base import EpisodeResult, RolloutWorkflow
from areno.rollouts.workflows.rlvr import input_ids_of
from areno.training.frequency import StepInfo
from areno.training.reporter import StepOutcome


class ToolEpisodes(RolloutWorkflow):
    """In each turn a few tokens, then a tool that takes its time and answers with one token.

    The reward is the share of what was said that is the letter asked for.

    Args:
        gconfig: how to sample.
        tokenizer: the model's.
        latency: of the tools.
    """

    def __init__(self, gconfig: Any, tokenizer: Any, latency: Latency) -> None:
        self.gconfig, self.tokenizer, self.latency = gconfig, tokenizer, latency
        self.answer = tokenizer.convert_tokens_to_ids(".")

    async def arun_episode(self, engine: EngineClient, data: dict[str, Any]) -> EpisodeResult:
        """See :meth:`RolloutWorkflow.arun_episode`."""
        episode = EPISODE.get()
        assert episode is not None
        tokens = list(input_ids_of(data["prompt"], self.tokenizer, False))
        row = TrajectoryRow(tokens, [], [], [], [0.0] * len(tokens), [-1] * len(tokens), 1.0, False, lambda: [])
        row.trained = [False] * len(tokens)
        for seconds in self.latency.of_episode(episode.task_id, episode.sample):
            answer = await engine.agenerate(ModelRequest(list(row.tokens), self.gconfig))
            said = len(answer.output_tokens)
            row.tokens += [*answer.output_tokens, self.answer]
            row.trained += [True] * said + [False]
            row.logprobs += [*answer.output_logprobs, 0.0]
            row.versions += [*answer.output_versions, -1]
            await asyncio.sleep(seconds)
        row.temperature, row.sampled = answer.temperature, row.trained
        letter = self.tokenizer.convert_tokens_to_ids(data["letter"])
        counted = [token == letter for token, mine in zip(row.tokens, row.trained, strict=True) if mine]
        return make_trajectory([(row, sum(counted) / len(counted))])


class TimedTrainer(PPOTrainer):
    """Notes when each step ends."""

    ends: list[float]

    def run_step(self, at: StepInfo) -> StepOutcome:
        """See :meth:`PPOTrainer.run_step`."""
        self.ends = getattr(self, "ends", None) or [time.perf_counter()]
        outcome = super().run_step(at)
        self.ends.append(time.perf_counter())
        return outcome


def configuration(settings: dict[str, Any]) -> GRPOConfig:
    """The experiment of this side."""
    folder, name = Path(settings["folder"]), settings["name"]
    steps, new_tokens = settings["steps"], settings["new_tokens"]
    tree = {
        "experiment_name": "async",
        "trial_name": name,
        "seed": settings["seed"],
        "total_train_steps": steps,
        "total_train_epochs": 1000,
        "cluster": {"fileroot": str(folder / "runs")},
        "train_dataset": {"path": str(folder / "train.jsonl"), "type": "rl", "batch_size": settings["batch"]},
        "valid_dataset": {"path": str(folder / "valid.jsonl"), "type": "rl"},
        "evaluator": {"freq_steps": steps},
        "gconfig": {
            "n_samples": settings["samples"],
            "max_new_tokens": new_tokens,
            "max_tokens": 512,
            "ignore_eos": True,
        },
        "rollout": {
            "backend": "areno:d1",
            "max_concurrent_rollouts": settings["concurrent"],
            "max_head_offpolicyness": settings["ahead"],
        },
        "actor": {
            "path": str(folder / "model"),
            "backend": "fsdp:d1",
            "ppo_n_minibatches": 1,
            "recompute_logprob": settings["decoupled"],
            "use_decoupled_loss": settings["decoupled"],
            "rejection_sampling": {"upper": 5.0} if settings["decoupled"] else None,
            "reward_norm": {"mean_level": "group", "std_level": "group"},
            "optimizer": {"lr": settings["lr"], "weight_decay": 0.0},
            "mb_spec": {"max_tokens_per_mb": 8192},
        },
    }
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(tree))  # JSON is YAML
    return load_expr_config(["--config", str(file)], GRPOConfig)[0]


def main() -> None:
    settings = json.loads(sys.argv[1])
    config = configuration(settings)
    latency = Latency(**settings["latency"])
    with TimedTrainer(config) as trainer:
        tokenizer = trainer.engine.tokenizer
        tools = ToolEpisodes(config.gconfig, tokenizer, latency)
        at_once = ToolEpisodes(config.gconfig, tokenizer, Latency(turns=latency.turns, scale=0.0))
        trainer.train(workflow=tools, eval_workflow=at_once)
        lines = trainer.run_dir.read_metrics()
        ends = trainer.ends
    parts = ("rollout", "recompute_logp", "compute_advantage", "train_step", "update_weights")
    result = {
        "ends": [end - ends[0] for end in ends],
        "parts": {p: [line[f"timeperf/{p}"] for line in lines] for p in parts if f"timeperf/{p}" in lines[0]},
        "rewards": [line["rollout/reward/avg"] for line in lines],
        "staleness": [line["rollout/staleness/avg"] for line in lines],
        "worst_staleness": max(line["rollout/staleness/max"] for line in lines),
        "final_reward": lines[-1]["eval-rollout/reward/avg"],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
