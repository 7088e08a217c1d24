"""Recovery points: everything that a killed experiment needs to go on, written so that a kill leaves a whole one.

A point is a folder of ``areno.engine.checkpoint.folder`` (temporary name, flushed to the disk, renamed), with

    trainer/                   weights, optimizer, learning-rate schedule: whatever the trainer writes and reads
    rollout.pt                 finished but unused trajectories, queue, versions
    trainer_state/             step, counters, data position, random state; SHA-256 of every other file

Special here: a point counts when each of its files is what was written; one that is damaged is set aside and the one before
it is taken. Nothing that is read can run code, and a folder that somebody else could have written to is refused. Looking
for a point makes no folder.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areno.engine.checkpoint.contents import check_files, read_state, write_state
from areno.engine.checkpoint.folder import CheckpointFolder
from areno.engine.checkpoint.rng import capture_rng, restore_rng
from areno.errors import CheckpointError, DamagedCheckpointError, UsageError
from areno.experiments import plain_objects
from areno.experiments.frequency import FrequencyControl, StepInfo
from areno.experiments.saving import DISK_REMEDY

_log = logging.getLogger(__name__)

MODES = {"on": True, "auto": True, "off": False, "disabled": False}
_KEPT = 2
_TRAINER, _ROLLOUT = "trainer", "rollout.pt"


@dataclass(frozen=True, slots=True)
class RecoveryPoint:
    """A whole point on the disk.

    Args:
        folder: the point.
        step: last finished step.
        states: counters and positions by name, as they were given to :meth:`Recovery.dump`.
        rng: random state of the process that trained.
        rhythm: counters of the points themselves.
    """

    folder: Path
    step: StepInfo
    states: dict[str, Any]
    rng: dict[str, Any]
    rhythm: dict[str, Any]

    @property
    def trainer(self) -> Path:
        """Folder that the trainer wrote."""
        return self.folder / _TRAINER

    def rollout_state(self) -> Any:
        """What was given to :meth:`Recovery.dump`."""
        return plain_objects.load(self.folder / _ROLLOUT)

    def restore_rng(self) -> None:
        """Continue the process's random generators where they were."""
        restore_rng(self.rng)


class Recovery:
    """Writes and finds the recovery points of one trial; the newest two are kept.

    Args:
        root: folder that holds them; made when first needed.
        mode: ``on`` and ``auto`` continue from the newest point where there is one; ``off`` and ``disabled`` neither
            write points nor look for them.
        control: when a point is due.

    Raises:
        UsageError: an unknown mode.
    """

    def __init__(self, root: str | Path, mode: str, control: FrequencyControl) -> None:
        if mode not in MODES:
            raise UsageError(f"recover.mode={mode!r} is not a mode; use one of {', '.join(MODES)}")
        self.enabled = MODES[mode]
        self._control = control
        self._points = CheckpointFolder(root, keep=_KEPT, remedy=DISK_REMEDY.replace("saver.", "recover."))

    def dump_if_due(
        self,
        at: StepInfo,
        *,
        states: Callable[[], Mapping[str, Any]],
        write_trainer: Callable[[Path], None],
        rollout_state: Callable[[], Any] = lambda: None,
        needed_bytes: Callable[[], int] = int,
    ) -> Path | None:
        """Count a finished step, and write a point where one is due.

        Args:
            at: the step.
            states: gives what :meth:`dump` takes as ``states``.
            write_trainer: as for :meth:`dump`.
            rollout_state: gives what :meth:`dump` takes.
            needed_bytes: gives what :meth:`dump` takes.

        Returns:
            The point; None where none was due, or recovery is off.
        """
        if not (self._control.check(at) and self.enabled):
            return None
        return self.dump(
            at,
            states=states(),
            write_trainer=write_trainer,
            rollout_state=rollout_state(),
            needed_bytes=needed_bytes(),
        )

    def dump(
        self,
        at: StepInfo,
        *,
        states: Mapping[str, Any],
        write_trainer: Callable[[Path], None],
        rollout_state: Any = None,
        needed_bytes: int = 0,
    ) -> Path:
        """Write a point now.

        Args:
            at: last finished step.
            states: what JSON can hold, by name: counters of saver, evaluator and logger, data position, versions.
            write_trainer: fills a folder with weights, optimizer and schedule.
            rollout_state: what :func:`areno.experiments.plain_objects.save` can hold.
            needed_bytes: what ``write_trainer`` takes on the disk.

        Raises:
            CheckpointError: the disk is full, or a write failed.
        """
        completed = at.global_step + 1
        with self._points.writing(completed, needed_bytes) as folder:
            (folder / _TRAINER).mkdir()
            write_trainer(folder / _TRAINER)
            plain_objects.save(rollout_state, folder / _ROLLOUT)
            state = {
                "step": completed,
                "at": at.as_json(),
                "states": dict(states),
                "rhythm": self._control.state_dict(),
                "rng": capture_rng(),
            }
            write_state(folder, state)
        return self._points.path(completed)

    def load(self) -> RecoveryPoint | None:
        """The newest whole point, with the rhythm of the points restored; None where there is none or recovery is off.

        Raises:
            CheckpointError: there are points and none is whole, one cannot be read, or others can write to them.
        """
        if not self.enabled:
            return None
        _refuse_foreign(self._points.root)
        self._points.clear_leftovers()
        folder = self._points.to_resume(check=_check)
        if folder is not None:
            point = _read(folder)
            self._control.load_state_dict(point.rhythm)
            _log.info("recovering after global step %d from %s", point.step.global_step + 1, folder)
            return point
        _log.info("no recovery point in %s; the run begins at its first step", self._points.root)
        return None


def _check(folder: Path) -> None:
    _read(folder)
    check_files(folder, required=True)


def _read(folder: Path) -> RecoveryPoint:
    """The point in a folder.

    Raises:
        DamagedCheckpointError: its state lacks something.
    """
    state = read_state(folder)
    try:
        return RecoveryPoint(folder, StepInfo(**state["at"]), state["states"], state["rng"], state["rhythm"])
    except (KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"the state of {folder} has no usable {error}") from error


def _refuse_foreign(root: Path) -> None:
    """Refuse a folder of points that another user owns or may write to.

    Raises:
        CheckpointError: that is so; the message names the path and the remedy.
    """
    if not root.exists():
        return
    mine = {0, os.geteuid(), _owner_of_new_files(root)}
    closed = not root.stat().st_mode & stat.S_IRWXO  # then nobody comes to what lies below
    for path in (root, *root.rglob("*")):
        found = path.lstat()
        if found.st_uid not in mine:
            raise CheckpointError(
                f"{path} belongs to user {found.st_uid}, who may have written anything there; if that is right, chown it, "
                "else delete it or choose another trial_name"
            )
        if found.st_mode & stat.S_IWOTH and not closed and not path.is_symlink():
            raise CheckpointError(
                f"{path} can be written to by every user; if its content is right, chmod -R o-w {root}, else delete it"
            )


def _owner_of_new_files(root: Path) -> int:
    """User id of files that are made here now: a file server may give them to another one than the process's."""
    try:
        with tempfile.TemporaryFile(dir=root) as probe:
            return os.fstat(probe.fileno()).st_uid
    except OSError:
        return os.geteuid()
