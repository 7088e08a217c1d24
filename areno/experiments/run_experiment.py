"""Runs experiments, for ``areno run`` and for the legacy programs ``main_async_ppo.py`` and ``main_sync_ppo.py``."""

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from areno.config.experiment.experiments import (
    BaseExperimentConfig,
    DPOConfig,
    PPOConfig,
    RWConfig,
    SFTConfig,
)
from areno.config.experiment.legacy import load_legacy_config
from areno.config.experiment.loader import experiment_class, load_expr_config, settled
from areno.config.experiment.machine import resolve_for_machine
from areno.config.experiment.notices import notice
from areno.config.experiment.path_checks import DATASETS
from areno.config.experiment.saving import config_text
from areno.errors import ArenoError, EngineError, UsageError, exit_code
from areno.experiments.checks import check_inputs
from areno.experiments.folders import ExperimentFolders, open_log
from areno.experiments.slurm_job import batch_script, submit
from areno.launch.slurm_steps import in_job
from areno.training.stopping import StopRequested

_log = logging.getLogger(__name__)

DRY_RUN = "--dry-run"
MATH_REWARD = "areno.rollouts.workflows.math_reward.math_reward"


def trainer_class(config: BaseExperimentConfig) -> Any:
    """Return the trainer class for a configuration."""
    from areno.experiments import trainers

    kinds = (
        (PPOConfig, trainers.PPOTrainer),
        (SFTConfig, trainers.SFTTrainer),
        (RWConfig, trainers.RWTrainer),
        (DPOConfig, trainers.DPOTrainer),
    )
    return next(trainer for kind, trainer in kinds if isinstance(config, kind))


def run_experiment(config: BaseExperimentConfig) -> None:
    """Check the configuration, create the trainer, and run the experiment to its end.

    If recovery is enabled, the run survives up to ``recover.retries`` engine failures, such as dead processes. After each
    failure, the run resumes from the newest recovery checkpoint.
    """
    check_inputs(config)
    with open_log(config):
        _run_with_retries(config)


def _run_with_retries(config: BaseExperimentConfig) -> None:
    recovers = config.recover.enabled
    retries = config.recover.retries if recovers else 0
    for attempt in range(1, retries + 2):
        try:
            options: dict[str, Any] = {"workflow_is_named": True} if isinstance(config, PPOConfig) else {}
            with trainer_class(config)(config, **options) as trainer, trainer.stop.signals():
                trainer.train()
            return
        except StopRequested as stop:
            hint = (
                "run the same command again to resume" if recovers else "set recover.mode=auto to make runs resumable"
            )
            _log.warning("experiment stopped; %s", hint)
            raise SystemExit(128 + stop.signum) from None
        except EngineError as error:
            if attempt > retries:
                raise
            _log.warning(
                "retry %d of %d, from the newest recovery checkpoint, after an engine failure: %s",
                attempt,
                retries,
                error,
            )


def legacy_program(*, asynchronous: bool, argv: Sequence[str] | None = None) -> int:
    """Main function of ``main_async_ppo.py`` and ``main_sync_ppo.py``: train, and return the exit code of the program."""
    words = list(sys.argv[1:] if argv is None else argv)

    return guarded(lambda: run_experiment(legacy_config(words, asynchronous=asynchronous)))


def legacy_config(words: Sequence[str], *, asynchronous: bool) -> PPOConfig:
    """Return the configuration for the ``key=value`` options of ``main_async_ppo.py`` or ``main_sync_ppo.py``.

    If the options name neither a reward function nor a reward model, the reward is 1 for a mathematically correct answer.
    """
    config = load_legacy_config(words, asynchronous=asynchronous)
    if not config.reward.path:
        config.reward.fn = config.reward.fn or MATH_REWARD
    return config


def guarded(run: Callable[[], None]) -> int:
    """Call ``run``, and return the program's exit code, which is 0 if ``run`` raises no exception.

    For an `ArenoError`, SystemExit or KeyboardInterrupt, :func:`areno.errors.exit_code` determines the exit code. An
    `ArenoError` is printed to stderr.
    """
    try:
        run()
    except (ArenoError, SystemExit, KeyboardInterrupt) as error:  # SystemExit after --help
        return exit_code(error)
    return 0


def _check_resumed(config: BaseExperimentConfig, run: Path) -> None:
    """Raise UsageError if the run to resume was moved, or if its recovery is disabled."""
    logs = ExperimentFolders.of(config).logs
    if not (logs.is_dir() and logs.samefile(run)):
        raise UsageError(
            f"--resume {run}: according to its config.yaml, this run belongs in {logs}; move the run back to this directory"
        )
    if not config.recover.enabled:
        raise UsageError(
            f"--resume {run}: recover.mode is {config.recover.mode}, so the run has no recovery checkpoints and cannot be "
            "resumed; to start the run again from the first step and write recovery checkpoints, add recover.mode=auto to "
            "this command"
        )


def _dry_run(config: BaseExperimentConfig) -> str:
    """Check the configuration and its inputs, and return a description of the run.

    The function neither loads a model nor writes a file.
    """
    from areno.experiments.trainers.engines import machine_of
    from areno.experiments.trainers.row_source import RowSource, load_dataset

    check_inputs(config)
    config = settled(config)
    if config.scheduler.type == "slurm" and not in_job():
        return f"{config_text(config).rstrip()}\n{batch_script(config, ['areno', 'run', '...'])}dry run: nothing was submitted"
    notices = [notice(config), *resolve_for_machine(config, machine_of(config))]
    lines = [config_text(config).rstrip(), *filter(None, notices)]
    data = {name: load_dataset(section, name) for name in DATASETS if (section := getattr(config, name)) is not None}
    for name, rows in data.items():
        trainer_class(config).check_first_row(config, name, rows)
    per_epoch = RowSource(data["train_dataset"], config.train_dataset, config.seed).steps_per_epoch
    steps = config.total_train_epochs * per_epoch
    steps = min(steps, config.total_train_steps or steps)
    lines += [f"{name}: {len(rows)} rows" for name, rows in data.items()]
    lines.append(f"steps: {steps} ({per_epoch} per epoch), or fewer if the run drops over-long rows")
    folders = ExperimentFolders.of(config)
    lines += [f"run directory: {folders.logs}", f"models: {folders.checkpoints}"]
    return "\n".join([*lines, "dry run: nothing was started, and nothing was written"])


def main(argv: Sequence[str], resumed: Path | None = None) -> None:
    """Run the command ``areno run``. ``train_dataset.type`` selects the kind of experiment.

    ``resumed`` is the directory of the run to resume. If ``resumed`` is None, ``recover.mode`` decides whether to resume.
    """
    words = [word for word in argv if word != DRY_RUN]
    config, _ = load_expr_config(words, experiment_class(words))
    if resumed is not None:
        _check_resumed(config, resumed)
    if DRY_RUN in argv:
        sys.stdout.write(_dry_run(config) + "\n")
        return
    if config.scheduler.type == "slurm" and not in_job():
        check_inputs(config)
        if code := submit(config, words):
            raise SystemExit(code)
        return
    run_experiment(config)
