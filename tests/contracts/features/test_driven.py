"""Every feature of docs/front-ends.md is exercised with flags and with YAML on tiny models, in a few runs with many features.

The evidence for a feature is the same for both front ends (:mod:`tests.contracts.features.driven`). A run without options
shows only the features that are on by default; a feature of the table that no run exercises fails a test.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from areno.cli.main import main
from areno.engine.checkpoint.export import export_model
from areno.engine.engine import Engine, EngineConfig
from areno.engine.parallel.group import EngineGroup
from areno.engine.parallel.layout import Layout
from areno.engine.role import Role
from areno.observability.display import LiveProgress
from areno.rollouts.fleet.fleet import FleetOptions, RolloutFleet
from areno.training import reporter
from areno.training.frequency import FrequencyControl
from areno.training.loop import TrainingLoop
from areno.training.reporter import Reporter, StepOutcome
from docs.make_front_ends import FEATURES
from tests.agentic.agents import THREE_TURNS, write_agent
from tests.contracts.features.driven import EVIDENCE, ROWS, Driven, shows
from tests.support.loops import save_classifier
from tests.support.tiny import save_tiny_checkpoint

DATA = [
    {"prompt": f"What is {a} plus {a}?", "response": f"It is {2 * a}.", "chosen": "Even.", "rejected": "Odd?"}
    for a in range(ROWS)
]
FUNCTIONS, WORKFLOW = (Path(__file__).with_name(name) for name in ("functions.py", "workflow.py"))
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
IN_TURN = ["reward function", "alternating generation and training on the same devices"]
PLAIN = {
    "flags": (SFT, ["shared prompts computed once in training"]),
    "yaml": (RUN_SFT, ["saving in the background"]),
    "flags policy": (POLICY + " --epochs 1", [IN_TURN[0], "shared prompts computed once in training", *IN_TURN[1:]]),
    "yaml policy": (RUN_POLICY, [*IN_TURN, "saving in the background"]),
}
APART = (
    " rollout.scheduling_strategy.type=separation rollout.scheduling_strategy.target=null"
    " rollout.scheduling_strategy.fork=true rollout.backend=areno:d2 rollout.max_head_offpolicyness=1"
)
HELD_OUT = " valid_dataset.path={held_out} valid_dataset.type=sft evaluator.freq_steps=1"
DRIVES: dict[str, tuple[str, str]] = {
    "flags adapter": (
        SFT
        + " --epochs 2 --mini-bs 3 --lora-rank 4 --load-in-4bit --activation-checkpointing --eval-dataset-path {held_out}"
        " --eval-interval 1 --keep-best --save-interval 1",
        "passes over the data, size of a microbatch, LoRA, LoRA on a 4-bit base, recomputed activations, evaluation, "
        "best checkpoint, checkpoints to resume from",
    ),
    "flags stopped": (
        SFT + " --batch-size 4 --lr 1e-30 --min-lr 0 --adam-8bit --eval-dataset-path {held_out} --eval-interval 1"
        " --eval-before-train --early-stop-patience 2",
        "rows of a step, 8-bit Adam, evaluation, evaluation before training, early stopping",
    ),
    "flags ranks": (
        SFT.replace("{ckpt}", "{gguf}") + " --max-steps 1 --world-size 2 --fsdp",
        "maximum steps, several devices, weights sharded across replicas (FSDP2), a model in a GGUF file",
    ),
    "flags clock": (
        SFT + " --save-interval-minutes 0.15 --model-save-interval 1 --trace --max-sequences 24",
        "checkpoints at time intervals, models saved without training state, saving in the background, traces, "
        "maximum trained sequences",
    ),
    "flags update": (
        POLICY + " --max-steps 1 --batch-size 4 --n-samples 2 --update-epochs 2 --update-minibatches 2 --kl-coef 0.1"
        " --tree-training --speculate 2",
        "optimizer steps per pass over a rollout, passes over a rollout, shared prompts computed once in training, "
        "speculative decoding, KL in the loss, reward function",
    ),
    "flags routed": (
        POLICY.replace("{ckpt}", "{mixture}") + " --max-steps 1 --return-routed-experts --batch-size 4 --n-samples 2",
        "routing replay",
    ),
    "yaml routed": (
        RUN_POLICY.replace("{ckpt}", "{mixture}") + " total_train_steps=1 rollout.return_routed_experts=true",
        "routing replay",
    ),
    "flags named": (
        POLICY + " --max-steps 1 --algo gmpo --kl-reward-coef 0.1 --save-rollouts 1",
        "algorithm by name or from your own file, KL in the reward, saved training rows",
    ),
    "flags parts": (
        POLICY.replace("{functions}", "{functions}:parts")
        + " --max-steps 1 --reward-weights length=0.1 --reward-normalize-parts --advantage batch",
        "weights of a reward's parts, normalized parts of a reward",
    ),
    "yaml parts": (
        RUN_POLICY.replace(":letters", ":named") + " total_train_steps=1 reward.weights.length=0.1"
        " reward.normalize_parts=true rollout.save_rollouts=1",
        "weights of a reward's parts, normalized parts of a reward, saved training rows",
    ),
    "flags async": (
        TRAIN + " --algo grpo --workflow {workflow}:Quarter --batch-size 2 --n-samples 4 --max-steps 3 --rollout async"
        " --rollout-replicas 2 --max-staleness 1",
        "asynchronous rollout, rollout replicas, workflows",
    ),
    "flags agent": (
        POLICY.replace("{functions}", "{functions}:failing")
        + " --max-steps 1 --agent-fn {agent} --on-reward-error drop --metrics-log-dir {run}/tb --track wandb",
        "agents, handling of failing rewards, TensorBoard, W&B, SwanLab, Trackio, MLflow",
    ),
    "flags equal": (
        POLICY.replace("{functions}", "{functions}:equal") + " --epochs 1 --tune-params --tune-max-samples 8",
        "warnings about runs that cannot learn, concurrency and batch sizes tuned to the free memory",
    ),
    "flags dry": (POLICY + " --dry-run", "dry run"),
    "flags terminal": (SFT + " --max-steps 1", "live display on a terminal"),
    "yaml terminal": (RUN_SFT + " total_train_steps=1", "live display on a terminal"),
    "flags pairs": (
        TRAIN + " --algo dpo --batch-size 6 --max-steps 1 --dpo-label-smoothing 0.1",
        "label smoothing of DPO, disk cache for the log-probs of DPO's reference",
    ),
    "flags simpo": (
        TRAIN + " --algo simpo --batch-size 6 --max-steps 1",
        "preference training without a reference (SimPO)",
    ),
    "yaml pairs": (
        RUN + " train_dataset.type=dpo total_train_steps=1 actor.label_smoothing=0.1 ref.path={ckpt}",
        "label smoothing of DPO, disk cache for the log-probs of DPO's reference",
    ),
    "yaml simpo": (
        RUN + " train_dataset.type=dpo total_train_steps=1 actor.algorithm=simpo",
        "preference training without a reference (SimPO)",
    ),
    "flags judge": (
        TRAIN + " --algo grpo --reward-ckpt {judge} --batch-size 2 --n-samples 4 --max-steps 1",
        "reward model",
    ),
    "yaml async": (
        RUN_POLICY + " total_train_steps=3 workflow.path={workflow}:Quarter" + APART,
        "asynchronous rollout, rollout replicas, workflows",
    ),
    "yaml agent": (
        RUN_POLICY + " total_train_steps=1 rollout.agent.agent_cls_path=tests.experiments.settings_agents.Talker"
        " stats_logger.tensorboard.path={run}/tb stats_logger.wandb.mode=offline",
        "agents, TensorBoard, W&B, SwanLab, Trackio, MLflow",
    ),
    "yaml equal": (
        RUN_POLICY.replace(":letters", ":same") + " total_train_epochs=1",
        "warnings about runs that cannot learn",
    ),
    "flags plan": (POLICY.replace("train", "plan", 1), "memory plan before a run (`areno plan`)"),
    "yaml plan": (
        RUN_POLICY.replace("run", "plan", 1) + " --tune-params",
        "memory plan before a run (`areno plan`), concurrency and batch sizes tuned to the free memory",
    ),
    "yaml judge": (
        RUN_POLICY.replace("reward.fn={functions}:letters", "reward.path={judge}") + " total_train_steps=1",
        "reward model",
    ),
    "yaml failing": (
        RUN_POLICY.replace(":letters", ":stumbling") + " total_train_steps=2 train_dataset.shuffle=false"
        " reward.on_error=drop actor.eps_clip_higher=0.3",
        "handling of failing rewards, configurable policy loss (DAPO, CISPO, SAPO, M2PO, IcePop)",
    ),
    "flags family": (
        POLICY + " --max-steps 1 --algo dapo --eps-clip-higher 0.3",
        "configurable policy loss (DAPO, CISPO, SAPO, M2PO, IcePop)",
    ),
    "yaml dry": (RUN_POLICY + " --dry-run", "dry run"),
    "yaml update": (
        RUN_POLICY + " total_train_steps=1 train_dataset.batch_size=4 gconfig.n_samples=2 actor.ppo_n_epochs=2"
        " actor.ppo_n_minibatches=2 actor.enable_tree_training=true rollout.speculate=2 actor.kl_loss_coef=0.1"
        " ref.path={ckpt}",
        "optimizer steps per pass over a rollout, passes over a rollout, shared prompts computed once in training, "
        "speculative decoding, KL in the loss, reward function",
    ),
    "yaml named": (
        RUN_POLICY + " total_train_steps=1 actor.algorithm=gmpo actor.kl_ctl=0.1 ref.path={ckpt}",
        "algorithm by name or from your own file, KL in the reward",
    ),
    "yaml adapter": (
        RUN_SFT + " total_train_epochs=2 actor.mb_spec.max_tokens_per_mb=96 actor.use_lora=true actor.lora_rank=4"
        " actor.load_in_4bit=true"
        " actor.gradient_checkpointing=true evaluator.keep_best=true recover.mode=auto recover.freq_steps=1" + HELD_OUT,
        "passes over the data, size of a microbatch, LoRA, LoRA on a 4-bit base, recomputed activations, evaluation, "
        "best checkpoint, checkpoints to resume from",
    ),
    "yaml stopped": (
        RUN_SFT + " total_train_epochs=9 train_dataset.batch_size=4 actor.optimizer.lr=1e-30"
        " actor.optimizer.type=adam_8bit evaluator.eval_before_train=true evaluator.early_stop_patience=2" + HELD_OUT,
        "rows of a step, 8-bit Adam, evaluation, evaluation before training, early stopping",
    ),
    "yaml ranks": (
        RUN_SFT.replace("{ckpt}", "{gguf}") + " total_train_steps=1 actor.backend=fsdp:d2",
        "maximum steps, several devices, weights sharded across replicas (FSDP2), a model in a GGUF file",
    ),
    "yaml clock": (
        RUN_SFT + " recover.mode=auto recover.freq_secs=9 saver.freq_steps=1 perf_tracer.enabled=true"
        " total_train_n_seqs=12",
        "checkpoints at time intervals, models saved without training state, saving in the background, traces, "
        "maximum trained sequences",
    ),
}
AFTER_A_SIGNAL = ("saving on Ctrl-C, SIGTERM and SIGHUP", "exact resume")
STOP_AND_RESUME = {
    "flags": (POLICY + " --max-steps 3 --save-interval 1", "train --resume {run}"),
    "yaml": (RUN_POLICY + " total_train_steps=3 recover.mode=auto recover.freq_steps=1", ""),
}


OFFLOADING = ("optimizer in host memory", "activations in host memory")
ON_A_GPU = {
    "flags": (SFT + " --offload-optimizer --offload-activations", ("--offload-optimizer", "--offload-activations")),
    "yaml": (
        RUN_SFT + " actor.optimizer.offload=true actor.offload_activations=true actor.gradient_checkpointing=true",
        ("actor.optimizer.offload", "actor.offload_activations"),
    ),
}
"""Offloading has no effect on a CPU, which is an error before a model is loaded."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> dict[str, Path]:
    """Data and functions of all runs."""
    folder = tmp_path_factory.mktemp("features")
    paths = {"data": folder / "rows.jsonl", "functions": FUNCTIONS, "workflow": WORKFLOW, "yaml": folder / "run.yaml"}
    paths["held_out"] = folder / "held_out.jsonl"
    for name in ("data", "held_out"):
        paths[name].write_text("".join(json.dumps(row) + "\n" for row in DATA), encoding="utf-8")
    paths["yaml"].write_text("{}\n", encoding="utf-8")
    agent = write_agent(folder, THREE_TURNS)
    judge = save_classifier(folder / "judge", tiny_checkpoint)
    paths["mixture"] = save_tiny_checkpoint(folder / "mixture", "qwen3_moe")
    gguf = export_model(str(tiny_checkpoint), str(folder / "gguf"), gguf="f32") / "model-f32.gguf"
    return {**paths, "ckpt": tiny_checkpoint, "agent": agent, "judge": judge, "gguf": gguf}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Driven:
    """Records what the commands of a test do."""
    seen = Driven()
    set_up, make, make_group = TrainingLoop.set_up, Engine.__init__, EngineGroup.__init__

    def loop_made(loop: TrainingLoop, *arguments: Any, **more: Any) -> None:
        seen.loops.append(loop)
        set_up(loop, *arguments, **more)

    def engine_made(engine: Engine, path: Any, config: EngineConfig, *more: Any, **options: Any) -> None:
        seen.engines.append((config, Layout(1, 1)))
        seen.paths.append(str(path))
        make(engine, path, config, *more, **options)

    def group_made(group: Any, path: Any, config: EngineConfig, layout: Layout, *more: Any, **options: Any) -> None:
        seen.engines.append((config, layout))
        seen.paths.append(str(path))
        make_group(group, path, config, layout, *more, **options)

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            engine: Any, rows: Any, loss: Any, batching: Any, accumulation: Any = None, role: str = "actor"
        ) -> Any:
            if role == "actor":
                seen.calls.append((len(rows), batching))
                knobs = getattr(loss, "keywords", {})
                seen.losses.add(knobs.get("loss_fn", getattr(loss, "func", loss)).__name__)
                seen.knobs |= knobs
            return step(engine, rows, loss, batching, accumulation, role)

        return call

    def scored(score: Callable[..., Any]) -> Callable[..., Any]:
        def call(engine: Any, role: str, *more: Any, **options: Any) -> Any:
            seen.scored.add(role)
            return score(engine, role, *more, **options)

        return call

    def observed(reporter: Reporter, step: int, outcome: StepOutcome) -> bool:
        seen.rows.append(len(outcome.rows))
        return observe(reporter, step, outcome)

    observe = Reporter.observe
    monkeypatch.setattr(Reporter, "observe", observed)
    stage = Role.stage_model

    def staged(role: Role, tokenizer: Any) -> Any:
        seen.staged += 1
        return stage(role, tokenizer)

    monkeypatch.setattr(Role, "stage_model", staged)
    for name in ("score_logprobs", "score_rewards"):
        monkeypatch.setattr(Engine, name, scored(getattr(Engine, name)))

    def fleet_made(fleet: RolloutFleet, path: Any, config: Any, options: FleetOptions, *more: Any) -> None:
        seen.replicas += options.replicas
        make_fleet(fleet, path, config, options, *more)

    make_fleet = RolloutFleet.__init__
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(RolloutFleet, "__init__", fleet_made)
    monkeypatch.setattr(TrainingLoop, "set_up", loop_made)
    monkeypatch.setattr(Engine, "__init__", engine_made)
    monkeypatch.setattr(EngineGroup, "__init__", group_made)
    for kind in (Engine, EngineGroup):
        monkeypatch.setattr(kind, "train", counted(kind.train))
    return seen


def drive(run: Driven, command: str, files: dict[str, Path], folder: Path, capsys: Any) -> None:
    """Run a command in this process."""
    run.root = folder
    run.code = main([word.format(run=folder, **files) for word in command.split()])
    run.output += "".join(capsys.readouterr())


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_run_shows_only_features_that_are_on_by_default(name, run, files, tmp_path, capsys):
    command, features = PLAIN[name]
    drive(run, command, files, tmp_path / "run", capsys)
    assert run.code == 0, run.output
    assert [feature for feature in EVIDENCE if shows(run, feature)] == features


@pytest.mark.parametrize("name", DRIVES)
def test_a_run_shows_its_features(name, run, files, tmp_path, capsys, monkeypatch):
    command, features = DRIVES[name]
    if "clock" in name:  # a clock that advances by ten seconds whenever it is read
        monkeypatch.setattr(FrequencyControl.__init__, "__defaults__", (itertools.count(0, 10).__next__,))
    if "terminal" in name:
        console = Console(file=io.StringIO(), force_terminal=True)
        monkeypatch.setattr(reporter, "create_progress", lambda: LiveProgress(console))
    drive(run, command, files, tmp_path / "run", capsys)
    assert run.code == 0, run.output
    assert [feature for feature in names(features) if not shows(run, feature)] == []


@pytest.mark.parametrize(("side", "spelling"), [("flags", "flags"), ("yaml", "settings")])
def test_every_feature_of_the_page_is_exercised(side, spelling):
    runs = [names(features) for name, (_, features) in DRIVES.items() if name.startswith(side)]
    driven = {*IN_TURN, *AFTER_A_SIGNAL, *OFFLOADING, *itertools.chain.from_iterable(runs)}
    assert {feature.name for feature in FEATURES if getattr(feature, spelling)} - driven == set()
    assert driven <= {feature.name for feature in FEATURES}


def names(features: str) -> list[str]:
    """Split a list of features; some of their names contain commas."""
    return re.split(r", (?!SwanLab|Trackio|MLflow|scored once|CISPO|SAPO|M2PO|IcePop)", features)


@pytest.mark.parametrize("side", ON_A_GPU)
def test_gpu_features_are_refused_by_name_on_a_cpu(side, run, files, tmp_path, capsys):
    command, names = ON_A_GPU[side]
    drive(run, command, files, tmp_path / "run", capsys)
    assert (run.code, run.engines) == (2, [])
    assert [name for name in names if f"{name} " not in run.output] == []


@pytest.mark.parametrize("side", STOP_AND_RESUME)
def test_a_signal_saves_the_run_and_it_can_be_resumed(side, run, files, tmp_path, capsys, monkeypatch):
    first, second = STOP_AND_RESUME[side]
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
    assert [feature for feature in AFTER_A_SIGNAL if not shows(run, feature)] == []
