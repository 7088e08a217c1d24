"""Run an experiment from its command line: configuration first, then everything that takes long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areno.config.experiment.experiments import (
    BaseExperimentConfig,
    DPOConfig,
    PPOConfig,
    RWConfig,
    SFTConfig,
)
from areno.config.experiment.loader import experiment_class, load_expr_config


def trainer_class(config: BaseExperimentConfig) -> Any:
    """The trainer of a configuration."""
    from areno.experiments import trainers

    kinds = (
        (PPOConfig, trainers.PPOTrainer),
        (SFTConfig, trainers.SFTTrainer),
        (RWConfig, trainers.RWTrainer),
        (DPOConfig, trainers.DPOTrainer),
    )
    return next(trainer for kind, trainer in kinds if isinstance(config, kind))


def run_experiment(config: BaseExperimentConfig) -> None:
    """Make the trainer and run it to its end."""
    with trainer_class(config)(config) as trainer:
        trainer.train()


def main(argv: Sequence[str]) -> None:
    """``areno run``: the kind of experiment is what ``train_dataset.type`` says.

    Raises:
        ArenoError: the configuration is wrong, or the experiment failed.
    """
    config, _ = load_expr_config(argv, experiment_class(argv))
    run_experiment(config)
