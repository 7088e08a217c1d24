"""Every feature of docs/front-ends.md is driven from flags and from YAML on tiny models, in few runs that share them.

What shows a feature is the same for both front ends (:mod:`tests.contracts.features.driven`). A run without options shows
none; a feature of the table that no run drives fails a test.
"""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areno.cli.main import main
from areno.engine.engine import Engine, EngineConfig
from areno.engine.parallel.group import EngineGroup
from areno.engine.parallel.peers import Layout
from areno.engine.role import Role
from areno.training.frequency import FrequencyControl
from areno.training.loop import TrainingLoop
from areno.training.report import Reporter, StepOutcome
from tests.contracts.features.driven import EVIDENCE, ROWS, Driven, shows

DATA = [
    {"prompt": f"What is {a} plus {a}?", "response": f"It is {2 * a}.", "chosen": "Even.", "rejected": "Odd?"}
    for a in range(ROWS)
]
WORKFLOW = """
from areno.rollouts.conversation.rows import completion_row
from areno.rollouts.engine_client import ModelRequest
from areno.rollouts.trajectory import make_trajectory
from areno.rollouts.workflows.base import RolloutWorkflow


class Generous(RolloutWorkflow):
    def __init__(self, gconfig, tokenizer):
        self.gconfig, self.tokenizer = gconfig, tokenizer

    async def arun_episode(self, engine, data):
        prompt = self.tokenizer(data["prompt"])["input_ids"]
        answer = await engine.agenerate(ModelRequest(prompt, self.gconfig))
        return make_trajectory([(completion_row(prompt, answer.sequence), 9.0 + sum(answer.output_tokens) % 7)])
"""
FUNCTIONS = """
def reward_fn(record):
    return sum(record.tokens) % 7 / 7


def letters(prompt, completions, prompt_ids, completion_ids, **row):
    return sum(completion_ids) % 7 / 7


def load_training_dataset(path, *, default_loader, **_):
    return default_loader(path)
"""
TRAIN = "train --ckpt {ckpt} --dataset-path {data} --run-dir {run} --mini-bs 8 --max-new-tokens 6 --lr 1e-3"
SFT = TRAIN + " --algo sft --dataset-loader-fn {functions} --batch-size 6"
POLICY = TRAIN + " --algo grpo --reward-fn-path {functions} --batch-size 2 --n-samples 4"
RUN = (
    "run {yaml} experiment_name=toy trial_name=t cluster.fileroot={run} train_dataset.path={data} actor.path={ckpt} "
    "actor.backend=fsdp:d1 actor.optimizer.lr=0.001 train_dataset.batch_size=6"
)
RUN_SFT = RUN + " train_dataset.type=sft"
RUN_POLICY = (
    RUN + " train_dataset.type=rl train_dataset.batch_size=2 gconfig.n_samples=4 gconfig.max_new_tokens=6"
    " gconfig.max_tokens=128 rollout.backend=areno:d1 rollout.scheduling_strategy.type=colocation"
    " rollout.scheduling_strategy.target=actor rollout.scheduling_strategy.fork=false reward.fn={functions}:letters"
    " actor.reward_norm.mean_level=group"
)
PLAIN = {
    "flags": (SFT, []),
    "yaml": (RUN_SFT, ["saving beside training"]),
    "flags policy": (POLICY + " --epochs 1", ["reward function"]),
    "yaml policy": (RUN_POLICY, ["reward function", "saving beside training"]),
}
HELD_OUT = " valid_dataset.path={held_out} valid_dataset.type=sft evaluator.freq_steps=1"
DRIVES: dict[str, tuple[str, str]] = {
    "flags adapter": (
        SFT
        + " --epochs 2 --mini-bs 3 --lora-rank 4 --load-in-4bit --activation-checkpointing --eval-dataset-path {held_out}"
        " --eval-interval 1 --keep-best --save-interval 1",
        "passes over the data, rows of one pass, LoRA, LoRA on a base in 4 bits, recomputed activations, evaluation, "
        "best checkpoint, checkpoints to resume from",
    ),
    "flags stopped": (
        SFT + " --batch-size 4 --lr 1e-30 --min-lr 0 --adam-8bit --eval-dataset-path {held_out} --eval-interval 1"
        " --eval-before-train --early-stop-patience 2",
        "rows of a step, 8-bit Adam, evaluation, evaluation before training, early stop",
    ),
    "flags ranks": (
        SFT + " --max-steps 1 --world-size 2 --fsdp",
        "most steps, several devices, weights sharded over replicas (FSDP2)",
    ),
    "flags clock": (
        SFT + " --save-interval-minutes 0.15 --model-save-interval 1 --trace --max-sequences 24",
        "checkpoints by the clock, models beside checkpoints, saving beside training, traces, most trained sequences",
    ),
    "flags update": (
        POLICY + " --max-steps 1 --batch-size 4 --n-samples 2 --update-epochs 2 --update-minibatches 2 --kl-coef 0.1"
        " --tree-training --speculate 2",
        "optimizer steps per rollout, passes over a rollout, prompts shared in training, speculative decoding, "
        "KL in the loss, reward function",
    ),
    "flags named": (
        POLICY + " --max-steps 1 --algo gmpo --kl-reward-coef 0.1",
        "algorithm by name or from your own file, KL in the reward",
    ),
    "flags beside": (
        POLICY.replace("--reward-fn-path {functions}", "--workflow {workflow}:Generous")
        + " --max-steps 2 --rollout async --rollout-replicas 2 --max-staleness 1",
        "workflows, asynchronous rollout, rollout replicas",
    ),
    "yaml beside": (
        RUN + " total_train_steps=2 train_dataset.type=rl train_dataset.batch_size=2 gconfig.n_samples=4"
        " gconfig.max_new_tokens=6 gconfig.max_tokens=128 rollout.backend=areno:d2 rollout.max_head_offpolicyness=1"
        " rollout.max_concurrent_rollouts=8 workflow.path={workflow}:Generous",
        "workflows, asynchronous rollout, rollout replicas",
    ),
    "yaml update": (
        RUN_POLICY + " total_train_steps=1 train_dataset.batch_size=4 gconfig.n_samples=2 actor.ppo_n_epochs=2"
        " actor.ppo_n_minibatches=2 actor.enable_tree_training=true rollout.speculate=2",
        "optimizer steps per rollout, passes over a rollout, prompts shared in training, speculative decoding, "
        "reward function",
    ),
    "yaml named": (
        RUN_POLICY + " total_train_steps=1 actor.algorithm=gmpo actor.kl_ctl=0.1 ref.path={ckpt}",
        "algorithm by name or from your own file, KL in the reward",
    ),
    "yaml adapter": (
        RUN_SFT + " total_train_epochs=2 actor.mb_spec.max_tokens_per_mb=96 actor.use_lora=true actor.lora_rank=4"
        " actor.load_in_4bit=true"
        " actor.gradient_checkpointing=true evaluator.keep_best=true recover.mode=auto recover.freq_steps=1" + HELD_OUT,
        "passes over the data, rows of one pass, LoRA, LoRA on a base in 4 bits, recomputed activations, evaluation, "
        "best checkpoint, checkpoints to resume from",
    ),
    "yaml stopped": (
        RUN_SFT + " total_train_epochs=9 train_dataset.batch_size=4 actor.optimizer.lr=1e-30"
        " actor.optimizer.type=adam_8bit evaluator.eval_before_train=true evaluator.early_stop_patience=2" + HELD_OUT,
        "rows of a step, 8-bit Adam, evaluation, evaluation before training, early stop",
    ),
    "yaml ranks": (
        RUN_SFT + " total_train_steps=1 actor.backend=fsdp:d2",
        "most steps, several devices, weights sharded over replicas (FSDP2)",
    ),
    "yaml clock": (
        RUN_SFT + " recover.mode=auto recover.freq_secs=9 saver.freq_steps=1 perf_tracer.enabled=true"
        " total_train_n_seqs=12",
        "checkpoints by the clock, models beside checkpoints, saving beside training, traces, most trained sequences",
    ),
}
ENDS_AND_GOES_ON = {
    "flags": (POLICY + " --max-steps 3 --save-interval 1", "train --resume {run}"),
    "yaml": (RUN_POLICY + " total_train_steps=3 recover.mode=auto recover.freq_steps=1", ""),
}


ON_A_GPU = {
    "flags": (SFT + " --offload-optimizer --offload-activations", ("--offload-optimizer", "--offload-activations")),
    "yaml": (
        RUN_SFT + " actor.optimizer.offload=true actor.offload_activations=true actor.gradient_checkpointing=true",
        ("actor.optimizer.offload", "actor.offload_activations"),
    ),
}
"""Offloading has nothing to do on a CPU, and says so before a model is loaded."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> dict[str, Path]:
    """Data and functions of all runs."""
    folder = tmp_path_factory.mktemp("features")
    paths = {"data": folder / "rows.jsonl", "functions": folder / "functions.py", "yaml": folder / "run.yaml"}
    paths["workflow"] = folder / "workflow.py"
    paths["held_out"] = folder / "held_out.jsonl"
    for name in ("data", "held_out"):
        paths[name].write_text("".join(json.dumps(row) + "\n" for row in DATA), encoding="utf-8")
    paths["functions"].write_text(FUNCTIONS, encoding="utf-8")
    paths["workflow"].write_text(WORKFLOW, encoding="utf-8")
    paths["yaml"].write_text("{}\n", encoding="utf-8")
    return {**paths, "ckpt": tiny_checkpoint}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Driven:
    """What the commands of a test do."""
    seen = Driven()
    set_up, make, make_group = TrainingLoop.set_up, Engine.__init__, EngineGroup.__init__

    def loop_made(loop: TrainingLoop, *arguments: Any, **more: Any) -> None:
        seen.loops.append(loop)
        set_up(loop, *arguments, **more)

    def engine_made(engine: Engine, path: Any, config: EngineConfig, *more: Any, **options: Any) -> None:
        seen.engines.append((config, Layout(1, 1)))
        make(engine, path, config, *more, **options)

    def group_made(group: Any, path: Any, config: EngineConfig, layout: Layout, *more: Any, **options: Any) -> None:
        seen.engines.append((config, layout))
        make_group(group, path, config, layout, *more, **options)

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            engine: Any, rows: Any, loss: Any, batching: Any, accumulation: Any = None, role: str = "actor"
        ) -> Any:
            if role == "actor":
                seen.calls.append((len(rows), batching))
                seen.losses.add(getattr(loss, "func", loss).__name__)
            return step(engine, rows, loss, batching, accumulation, role)

        return call

    def scored(score: Callable[..., Any]) -> Callable[..., Any]:
        def call(engine: Any, role: str, *more: Any, **options: Any) -> Any:
            seen.scored.add(role)
            return score(engine, role, *more, **options)

        return call

    def observed(report: Reporter, step: int, outcome: StepOutcome) -> bool:
        seen.rows.append(len(outcome.rows))
        return observe(report, step, outcome)

    observe = Reporter.observe
    monkeypatch.setattr(Reporter, "observe", observed)
    stage = Role.stage_model

    def staged(role: Role, tokenizer: Any) -> Any:
        seen.staged += 1
        return stage(role, tokenizer)

    monkeypatch.setattr(Role, "stage_model", staged)
    for name in ("score_logprobs", "score_rewards"):
        monkeypatch.setattr(Engine, name, scored(getattr(Engine, name)))
    monkeypatch.setattr(TrainingLoop, "set_up", loop_made)
    monkeypatch.setattr(Engine, "__init__", engine_made)
    monkeypatch.setattr(EngineGroup, "__init__", group_made)
    for kind in (Engine, EngineGroup):
        monkeypatch.setattr(kind, "train", counted(kind.train))
    return seen


def drive(run: Driven, command: str, files: dict[str, Path], folder: Path, capsys: Any) -> None:
    """Run a command in this process."""
    run.code = main([word.format(run=folder, **files) for word in command.split()])
    run.output += "".join(capsys.readouterr())


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_run_shows_none(name, run, files, tmp_path, capsys):
    command, features = PLAIN[name]
    drive(run, command, files, tmp_path / "run", capsys)
    assert run.code == 0, run.output
    assert [feature for feature in EVIDENCE if shows(run, feature)] == features


@pytest.mark.parametrize("name", DRIVES)
def test_features(name, run, files, tmp_path, capsys, monkeypatch):
    command, features = DRIVES[name]
    if "clock" in name:  # on which ten seconds pass whenever it is looked at
        options = {**FrequencyControl.__init__.__kwdefaults__, "clock": itertools.count(0, 10).__next__}
        monkeypatch.setattr(FrequencyControl.__init__, "__kwdefaults__", options)
    drive(run, command, files, tmp_path / "run", capsys)
    assert run.code == 0, run.output
    assert [feature for feature in features.split(", ") if not shows(run, feature)] == []


@pytest.mark.parametrize("side", ON_A_GPU)
def test_features_of_gpus_are_refused_by_name(side, run, files, tmp_path, capsys):
    command, names = ON_A_GPU[side]
    drive(run, command, files, tmp_path / "run", capsys)
    assert (run.code, run.engines) == (2, [])
    assert [name for name in names if f"{name} " not in run.output] == []


@pytest.mark.parametrize("side", ENDS_AND_GOES_ON)
def test_a_signal_saves_and_the_run_goes_on(side, run, files, tmp_path, capsys, monkeypatch):
    first, second = ENDS_AND_GOES_ON[side]
    advance = TrainingLoop._advance

    def stopped(loop: TrainingLoop, planned: Any) -> None:
        advance(loop, planned)
        if len(run.loops) == 1:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(TrainingLoop, "_advance", stopped)
    drive(run, first, files, tmp_path / "run", capsys)
    assert run.code == 128 + signal.SIGTERM
    drive(run, second or first, files, tmp_path / "run", capsys)
    assert run.code == 0, run.output
    assert shows(run, "saving on Ctrl-C, SIGTERM and SIGHUP")
    assert shows(run, "exact resume")
