"""A program that runs an experiment, with data sets, workflows and filters in Python.

python3 examples/experiments/train.py --config examples/experiments/grpo.yaml actor.optimizer.lr=1e-3 seed=42
"""

from __future__ import annotations

import sys

from toy import letter_reward

from areno.config.experiment import GRPOConfig, load_expr_config
from areno.experiments.folders import open_log
from areno.experiments.run_experiment import guarded


def not_all_equal(trajectory: dict) -> bool:
    """Reject groups of several answers with equal rewards, because there is nothing to learn from such groups."""
    rewards = trajectory["rewards"]
    return len(rewards) == 1 or bool(rewards.min() < rewards.max())


def main(argv: list[str]) -> None:
    """Read the configuration, and train."""
    config, _ = load_expr_config(argv, GRPOConfig)
    with open_log(config):
        # Imported here so that wrong settings are reported, and the first log lines written, before torch is loaded.
        from areno.experiments.trainers import PPOTrainer
        from areno.rollouts.workflows.rlvr import RLVRWorkflow

        with PPOTrainer(config) as trainer:
            trainer.train(
                workflow=RLVRWorkflow,
                workflow_kwargs={
                    "reward_fn": letter_reward,
                    "gconfig": config.gconfig,
                    "tokenizer": trainer.engine.tokenizer,
                },
                dynamic_filter_fn=not_all_equal,
            )


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
