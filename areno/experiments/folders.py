"""The directories of an experiment below ``fileroot``.

    {fileroot}/logs/{user}/{experiment}/{trial}/          the run directory: main.log, metrics.jsonl, samples.jsonl, ...
    {fileroot}/checkpoints/{user}/{experiment}/{trial}/   default/ and critic/ for models, recover/ for recovery checkpoints

``checkpoints`` in the run directory is a link to the second directory, for tools that read run directories.
"""

from __future__ import annotations

import getpass
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from areno.config.experiment.experiments import BaseExperimentConfig
from areno.config.experiment.worker_sections import DEFAULT_FILEROOT
from areno.errors import UsageError
from areno.observability.logs import LoggingSetup, setup_logging
from areno.reports.report import report_at_end
from areno.storage.run_dir import RunDirectory
from areno.storage.run_layout import EXPERIMENT
from areno.storage.run_lock import run_lock
from areno.storage.run_status import recorded_status

_log = logging.getLogger(__name__)


def _user() -> str:
    """Return the user name for paths, or the user id if the user has no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


@contextmanager
def open_log(config: BaseExperimentConfig) -> Iterator[RunDirectory]:
    """Open the run directory and its log for the duration of the block. A nested call only yields the run directory.

    The first log line contains the path of the directory. The function does not import torch, which would take seconds.
    """
    run_dir = ExperimentFolders.of(config).create()
    if LoggingSetup.active is not None:
        yield run_dir
        return
    with _locked(config):
        _refuse_second_run(config, run_dir)
        with setup_logging(run_dir), report_at_end(run_dir), recorded_status(run_dir):
            _log.info("%s/%s: run directory %s", config.experiment_name, config.trial_name, run_dir.path)
            yield run_dir


def _refuse_second_run(config: BaseExperimentConfig, run_dir: RunDirectory) -> None:
    """Raise UsageError if the trial has run already and recovery is disabled.

    The check comes before any change of the earlier run's files.
    """
    if not config.recover.enabled and run_dir.read_metrics():
        raise UsageError(
            f"trial_name {config.trial_name!r}: {config.experiment_name}/{config.trial_name} has run already, in "
            f"{run_dir.path}, and recovery is disabled; choose another trial_name, or set recover.mode=auto"
        )


@contextmanager
def _locked(config: BaseExperimentConfig) -> Iterator[None]:
    """Hold locks on the run directory of the trial, and on its checkpoint directories outside ``cluster.fileroot``."""
    default, roots = ExperimentFolders.of(config), (config.saver.fileroot, config.recover.fileroot)
    elsewhere = {ExperimentFolders.of(config, root).checkpoints.resolve() for root in roots}
    with ExitStack() as locks:
        for folder in (default.logs, *sorted(elsewhere - {default.checkpoints.resolve()})):
            locks.enter_context(run_lock(folder, "or choose another trial_name"))
        yield


@dataclass(frozen=True, slots=True)
class ExperimentFolders:
    """The directories of a trial. ``user`` defaults to the current user. The properties do not create directories."""

    fileroot: str | Path
    experiment: str
    trial: str
    user: str = field(default_factory=_user)

    @classmethod
    def of(cls, config: BaseExperimentConfig, root: str = "") -> ExperimentFolders:
        """Return the directories of an experiment below ``root``; with an empty ``root``, below ``cluster.fileroot``."""
        return cls(root or config.cluster.fileroot, config.experiment_name, config.trial_name)

    def _below(self, kind: str) -> Path:
        return Path(self.fileroot).expanduser() / kind / self.user / self.experiment / self.trial

    @property
    def logs(self) -> Path:
        """The run directory."""
        return self._below("logs")

    @property
    def checkpoints(self) -> Path:
        """Root of saved models."""
        return self._below("checkpoints")

    @property
    def recover(self) -> Path:
        """Root of recovery checkpoints."""
        return self.checkpoints / EXPERIMENT.checkpoints

    @property
    def run_dir(self) -> RunDirectory:
        """The files in the run directory."""
        return RunDirectory(self.logs, EXPERIMENT)

    def create(self) -> RunDirectory:
        """Create the checkpoint directory, and the run directory with a link to the checkpoint directory.

        Raises:
            UsageError: a directory cannot be created.
        """
        run_dir = self.run_dir
        try:
            if self.fileroot == DEFAULT_FILEROOT:
                Path(self.fileroot).expanduser().mkdir(mode=0o700, parents=True, exist_ok=True)
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.logs.mkdir(parents=True, exist_ok=True)
            if not run_dir.checkpoints_path.is_symlink() and not run_dir.checkpoints_path.exists():
                # Relative, so that the link survives copying or mounting the fileroot.
                run_dir.checkpoints_path.symlink_to(
                    os.path.relpath(self.checkpoints, self.logs), target_is_directory=True
                )
        except OSError as error:
            raise UsageError(
                f"cluster.fileroot {self.fileroot}: cannot create {error.filename or self.logs} "
                f"({error.strerror or error}); choose another cluster.fileroot"
            ) from error
        return run_dir.create("choose another trial_name or cluster.fileroot")
