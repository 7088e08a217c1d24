"""Writes ``docs/front-ends.md``: each feature, with its option of ``areno train`` and its setting of ``areno run``.

    python docs/make_front_ends.py

A test compares the file with the result of `render`, and checks that every option and setting exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).with_name("front-ends.md")
ALWAYS = "always"

_HEAD = """\
# Options and settings side by side

<!-- Written by docs/make_front_ends.py; do not edit by hand. -->

`areno train` takes command-line options, and `areno run` takes a YAML file and settings. Both commands run the same
training loop. The table lists the options and settings of each feature. The entry "always" means that the feature is
always available and needs no option or setting.

| What | `areno train` | `areno run` |
|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Feature:
    """One row of the table in ``docs/front-ends.md``.

    Attributes:
        name: name of the feature.
        flags: options of ``areno train`` for the feature, or ``always`` if the feature needs no option. Empty if
            ``areno train`` lacks the feature.
        settings: settings of ``areno run`` for the feature, or ``always`` if the feature needs no setting. Empty if
            ``areno run`` lacks the feature.
    """

    name: str
    flags: tuple[str, ...]
    settings: tuple[str, ...]


FEATURES = (
    Feature("passes over the data", ("--epochs",), ("total_train_epochs",)),
    Feature("maximum steps", ("--max-steps",), ("total_train_steps",)),
    Feature("maximum trained sequences", ("--max-sequences",), ("total_train_n_seqs",)),
    Feature("rows of a step", ("--batch-size",), ("train_dataset.batch_size",)),
    Feature("size of a microbatch", ("--mini-bs",), ("actor.mb_spec.max_tokens_per_mb",)),
    Feature("optimizer steps per pass over a rollout", ("--update-minibatches",), ("actor.ppo_n_minibatches",)),
    Feature("passes over a rollout", ("--update-epochs",), ("actor.ppo_n_epochs",)),
    Feature("shared prompts computed once in training", ("--tree-training",), ("actor.enable_tree_training",)),
    Feature("8-bit Adam", ("--adam-8bit",), ("actor.optimizer.type",)),
    Feature("a model in a GGUF file", ("--ckpt",), ("actor.path",)),
    Feature("LoRA", ("--lora-rank",), ("actor.use_lora", "actor.lora_rank")),
    Feature("LoRA on a 4-bit base", ("--load-in-4bit",), ("actor.load_in_4bit",)),
    Feature("optimizer in host memory", ("--offload-optimizer",), ("actor.optimizer.offload",)),
    Feature("activations in host memory", ("--offload-activations",), ("actor.offload_activations",)),
    Feature("recomputed activations", ("--activation-checkpointing",), ("actor.gradient_checkpointing",)),
    Feature("several devices", ("--world-size", "--tp-size"), ("actor.backend",)),
    Feature("weights sharded across replicas (FSDP2)", ("--fsdp",), ("actor.backend", "actor.fsdp.shard_weights")),
    Feature("algorithm by name or from your own file", ("--algo",), ("actor.algorithm",)),
    Feature(
        "configurable policy loss (DAPO, CISPO, SAPO, M2PO, IcePop)",
        ("--algo",),
        ("actor.eps_clip_higher", "actor.use_decoupled_loss", "actor.rejection_sampling"),
    ),
    Feature("preference training without a reference (SimPO)", ("--algo",), ("actor.algorithm",)),
    Feature("KL in the loss", ("--kl-coef", "--kl-loss-coef"), ("actor.kl_loss_coef",)),
    Feature("KL in the reward", ("--kl-reward-coef",), ("actor.kl_ctl",)),
    Feature("disk cache for the log-probs of DPO's reference", ("--ref-ckpt",), ("ref.path",)),
    Feature("label smoothing of DPO", ("--dpo-label-smoothing",), ("actor.label_smoothing",)),
    Feature("reward function", ("--reward-fn-path",), ("reward.fn",)),
    Feature("weights of a reward's parts", ("--reward-weights",), ("reward.weights",)),
    Feature("normalized parts of a reward", ("--reward-normalize-parts",), ("reward.normalize_parts",)),
    Feature("reward model", ("--reward-ckpt",), ("reward.path",)),
    Feature("handling of failing rewards", ("--on-reward-error",), ("reward.on_error",)),
    Feature("agents", ("--agent-fn",), ("rollout.agent.agent_cls_path",)),
    Feature("workflows", ("--workflow",), ("workflow.path",)),
    Feature("asynchronous rollout", ("--rollout", "--max-staleness"), ("rollout.max_head_offpolicyness",)),
    Feature(
        "alternating generation and training on the same devices", ("--rollout",), ("rollout.scheduling_strategy.fork",)
    ),
    Feature("rollout replicas", ("--rollout-replicas",), ("rollout.backend",)),
    Feature("speculative decoding", ("--speculate",), ("rollout.speculate",)),
    Feature("routing replay", ("--return-routed-experts",), ("rollout.return_routed_experts",)),
    Feature("evaluation", ("--eval-dataset-path", "--eval-interval"), ("valid_dataset.path", "evaluator.freq_steps")),
    Feature("evaluation before training", ("--eval-before-train",), ("evaluator.eval_before_train",)),
    Feature("best checkpoint", ("--keep-best",), ("evaluator.keep_best",)),
    Feature("early stopping", ("--early-stop-patience",), ("evaluator.early_stop_patience",)),
    Feature("checkpoints to resume from", ("--save-interval",), ("recover.freq_steps", "recover.mode")),
    Feature("checkpoints at time intervals", ("--save-interval-minutes",), ("recover.freq_secs",)),
    Feature("models saved without training state", ("--model-save-interval",), ("saver.freq_steps",)),
    Feature("saving in the background", ("--save-async",), ("saver.mode",)),
    Feature("exact resume", ("--resume",), ("recover.mode",)),
    Feature("saving on Ctrl-C, SIGTERM and SIGHUP", (ALWAYS,), (ALWAYS,)),
    Feature("warnings about runs that cannot learn", (ALWAYS,), (ALWAYS,)),
    Feature("live display on a terminal", (ALWAYS,), (ALWAYS,)),
    Feature("saved training rows", ("--save-rollouts",), ("rollout.save_rollouts",)),
    Feature("TensorBoard", ("--metrics-log-dir",), ("stats_logger.tensorboard.path",)),
    Feature("W&B, SwanLab, Trackio, MLflow", ("--track",), ("stats_logger.wandb.mode",)),
    Feature("traces", ("--trace",), ("perf_tracer.enabled",)),
    Feature("dry run", ("--dry-run",), ("--dry-run",)),
    Feature("memory plan before a run (`areno plan`)", (ALWAYS,), (ALWAYS,)),
    Feature("concurrency and batch sizes tuned to the free memory", ("--tune-params",), ("areno plan --tune-params",)),
)


def render() -> str:
    """Return the whole page as Markdown."""
    lines = [f"| {each.name} | {_cell(each.flags)} | {_cell(each.settings)} |" for each in FEATURES]
    return _HEAD + "\n".join(lines) + "\n"


def _cell(words: tuple[str, ...]) -> str:
    return ", ".join(word if word == ALWAYS else f"`{word}`" for word in words) or "-"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
