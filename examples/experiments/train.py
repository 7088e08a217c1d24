"""A program of one's own around an experiment: the place for data sets, workflows and filters in Python.

python3 examples/experiments/train.py --config examples/experiments/grpo.yaml actor.optimizer.lr=1e-3 seed=42
"""

from __future__ import annotations

import sys

from toy import letter_reward

from areno.config.experiment import GRPOConfig, load_expr_config
from areno.experiments.folders import open_log
from areno.experiments.run_experiment import guarded


def not_all_equal(trajectory: dict) -> bool:
    """Leave groups out that are all right or all wrong: they teach nothing."""
    return float(trajectory["rewards"].std()) > 0


def main(argv: list[str]) -> None:
    """Read the configuration, and train."""
    config, _ = load_expr_config(argv, GRPOConfig)
    with open_log(config):
        # Here and not at the top, so that wrong settings and the first lines are told before torch is loaded.
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
