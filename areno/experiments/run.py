"""Run an experiment from its command line: configuration first, then everything that takes long."""

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
from areno.experiments.submit import batch_script, submit
from areno.launch.slurm import in_job
from areno.training.stopping import StopRequested

_log = logging.getLogger(__name__)

DRY_RUN = "--dry-run"
MATH_REWARD = "areno.rollouts.workflows.math_reward.math_reward"


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
    """Check what the configuration names, make the trainer, and run it to its end.

    A failure of a process is followed by up to ``recover.retries`` further attempts, where recovery is switched on; each
    goes on from the newest restart point.
    """
    check_inputs(config)
    with open_log(config):
        _run_with_retries(config)


def _run_with_retries(config: BaseExperimentConfig) -> None:
    recovers = config.recover.enabled
    retries = config.recover.retries if recovers else 0
    for attempt in range(1, retries + 2):
        try:
            named: dict[str, Any] = {"workflow_is_named": True} if isinstance(config, PPOConfig) else {}
            with trainer_class(config)(config, **named) as trainer, trainer.stop.signals():
                trainer.train()
            return
        except StopRequested as stop:
            again = "run the same command again to go on" if recovers else "with recover.mode=auto it could go on"
            _log.warning("experiment stopped; %s", again)
            raise SystemExit(128 + stop.signum) from None
        except EngineError as error:
            if attempt > retries:
                raise
            _log.warning("the experiment goes on from its newest restart point (%d of %d): %s", attempt, retries, error)


def legacy_program(*, asynchronous: bool, argv: Sequence[str] | None = None) -> int:
    """``main_async_ppo.py`` and ``main_sync_ppo.py``: the keys of the quickstart; the reward is that of maths unless given."""
    words = list(sys.argv[1:] if argv is None else argv)

    def run() -> None:
        config = load_legacy_config(words, asynchronous=asynchronous)
        config.reward.fn = config.reward.fn or MATH_REWARD
        run_experiment(config)

    return guarded(run)


def guarded(run: Callable[[], None]) -> int:
    """Run something; an error becomes one message on stderr, and the exit code (2 for what the user can correct)."""
    try:
        run()
    except (ArenoError, SystemExit, KeyboardInterrupt) as error:  # SystemExit: help has been printed
        return exit_code(error)
    return 0


def _check_resumed(config: BaseExperimentConfig, run: Path) -> None:
    """Refuse a run that cannot be continued."""
    logs = ExperimentFolders.of(config).logs
    if not (logs.is_dir() and logs.samefile(run)):
        raise UsageError(f"--resume {run}: its configuration says that it is in {logs}; move it there")
    if not config.recover.enabled:
        raise UsageError(
            f"--resume {run}: recover.mode is {config.recover.mode}, so the run has no recovery points; to do it again from "
            "its first step, add recover.mode=auto"
        )


def _dry_run(config: BaseExperimentConfig) -> str:
    """Check an experiment as a run does before it loads a model, and say what it would do; nothing is written."""
    from areno.experiments.trainers.engines import machine_of
    from areno.experiments.trainers.rows import RowSource, load_dataset

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
    lines.append(f"steps: {steps}; an epoch has {per_epoch}, before too long rows are left out")
    folders = ExperimentFolders.of(config)
    lines += [f"run directory: {folders.logs}", f"models: {folders.checkpoints}"]
    return "\n".join([*lines, "dry run: nothing was started, and nothing was written"])


def main(argv: Sequence[str], resumed: Path | None = None) -> None:
    """``areno run``: the kind of experiment is what ``train_dataset.type`` says; ``--dry-run`` shows what it would do.

    The run directory ``resumed`` must be continued; without one it begins or continues as ``recover.mode`` says.
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
