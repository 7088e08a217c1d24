"""Where an experiment keeps its files: the documented folders below ``fileroot``.

    {fileroot}/logs/{user}/{experiment}/{trial}/          the run directory: main.log, metrics.jsonl, samples.jsonl, ...
    {fileroot}/checkpoints/{user}/{experiment}/{trial}/   default/ and critic/ for models, recover/ for recovery points

``checkpoints`` in the run directory is a link to the second one, so that tools that read run directories find both.
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
from areno.storage.layout import EXPERIMENT
from areno.storage.run_dir import RunDirectory
from areno.storage.run_lock import run_lock

_log = logging.getLogger(__name__)


def _user() -> str:
    """Name for the paths; a container's user may have none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


@contextmanager
def open_log(config: BaseExperimentConfig) -> Iterator[RunDirectory]:
    """The run directory of an experiment with its log, which the block writes to; its first line says where that is.

    Needs no torch, whose loading takes seconds. Inside of another such block only the directory is given.
    """
    run_dir = ExperimentFolders.of(config).create()
    if LoggingSetup.active is not None:
        yield run_dir
        return
    with _locked(config), setup_logging(run_dir):
        _log.info("%s/%s: everything is written to %s", config.experiment_name, config.trial_name, run_dir.path)
        yield run_dir


@contextmanager
def _locked(config: BaseExperimentConfig) -> Iterator[None]:
    """The trial for this process alone, also where its checkpoints have roots of their own."""
    others = {config.saver.fileroot, config.recover.fileroot} - {"", config.cluster.fileroot}
    places = [ExperimentFolders.of(config).logs]
    places += [ExperimentFolders.of(config, root).checkpoints for root in sorted(others)]
    with ExitStack() as held:
        for place in places:
            held.enter_context(run_lock(place, "or choose another trial_name"))
        yield


@dataclass(frozen=True, slots=True)
class ExperimentFolders:
    """The folders of one trial, of whoever runs the program unless a user is given; asking for a path makes nothing."""

    fileroot: str | Path
    experiment: str
    trial: str
    user: str = field(default_factory=_user)

    @classmethod
    def of(cls, config: BaseExperimentConfig, root: str = "") -> ExperimentFolders:
        """Those of an experiment, below ``cluster.fileroot`` unless another root is given."""
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
        """Root of recovery points."""
        return self.checkpoints / EXPERIMENT.checkpoints

    @property
    def run_dir(self) -> RunDirectory:
        """The run directory as areno's tools know it; its log is ``main.log``."""
        return RunDirectory(self.logs, EXPERIMENT)

    def create(self) -> RunDirectory:
        """Make the run directory, with a link to the checkpoints; :class:`UsageError` if that is not possible."""
        run_dir = self.run_dir
        try:
            if self.fileroot == DEFAULT_FILEROOT:
                Path(self.fileroot).expanduser().mkdir(mode=0o700, parents=True, exist_ok=True)
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.logs.mkdir(parents=True, exist_ok=True)
            if not run_dir.checkpoints_path.is_symlink() and not run_dir.checkpoints_path.exists():
                # Relative, so that a copied or mounted fileroot stays whole.
                run_dir.checkpoints_path.symlink_to(
                    os.path.relpath(self.checkpoints, self.logs), target_is_directory=True
                )
        except OSError as error:
            raise UsageError(
                f"fileroot {self.fileroot}: {error.filename or self.logs} cannot be made ({error.strerror or error}); "
                "choose another cluster.fileroot"
            ) from error
        return run_dir.create()
