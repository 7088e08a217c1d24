"""Recovery points: everything that a killed experiment needs to go on, written so that a kill leaves a whole one.

A point is a folder of ``areno.engine.checkpoint.folder`` (temporary name, flushed to the disk, renamed), with

    trainer/                   weights, optimizer, learning-rate schedule: whatever the trainer writes and reads
    rollout.pkl                finished but unused trajectories, queue, versions: any Python object
    trainer_state/state.json   step, counters, data position, random state, and the size of every other file

Special here: a point counts when each of its files is there in full; one that is damaged is set aside and the one before
it is taken. Looking for a point makes no folder.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areno.engine.checkpoint.folder import STATE_FILE, STATE_FOLDER, CheckpointFolder, read_state, write_state
from areno.engine.checkpoint.rng import capture_rng, restore_rng
from areno.errors import CheckpointError, UsageError
from areno.experiments.frequency import FrequencyControl, StepInfo
from areno.experiments.saving import DISK_REMEDY

_log = logging.getLogger(__name__)

MODES = {"on": True, "auto": True, "off": False, "disabled": False}
_KEPT = 2
_TRAINER, _ROLLOUT = "trainer", "rollout.pkl"


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
        """The rollout state; the file is the run's own, and like any pickle it may run code."""
        return pickle.loads((self.folder / _ROLLOUT).read_bytes())

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
            rollout_state: what pickle can hold.
            needed_bytes: what ``write_trainer`` takes on the disk.

        Raises:
            CheckpointError: the disk is full, or a write failed.
        """
        completed = at.global_step + 1
        with self._points.writing(completed, needed_bytes) as folder:
            (folder / _TRAINER).mkdir()
            write_trainer(folder / _TRAINER)
            with open(folder / _ROLLOUT, "wb") as file:
                pickle.dump(rollout_state, file, protocol=pickle.HIGHEST_PROTOCOL)
            state = {
                "step": completed,
                "at": at.as_json(),
                "states": dict(states),
                "rhythm": self._control.state_dict(),
                "rng": capture_rng(),
                "sizes": _sizes(folder),
            }
            write_state(folder, state)
        return self._points.path(completed)

    def load(self) -> RecoveryPoint | None:
        """The newest whole point, with the rhythm of the points restored; None where there is none or recovery is off.

        Points that are not whole are deleted, so that they do not take the place of a new one.
        """
        if not self.enabled:
            return None
        self._points.clear_leftovers()
        for completed in reversed(self._points.steps()):
            folder = self._points.path(completed)
            try:
                point = _read(folder)
            except CheckpointError as error:
                _log.warning("recovery point %s is not whole and is deleted: %s", folder, error)
                self._points.remove(completed)
                continue
            self._control.load_state_dict(point.rhythm)
            _log.info("recovering after global step %d from %s", completed, folder)
            return point
        _log.info("no recovery point in %s; the run begins at its first step", self._points.root)
        return None


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file by its path in the folder, the state's own left out."""
    files = (path for path in folder.rglob("*") if path.is_file())
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    sizes.pop(f"{STATE_FOLDER}/{STATE_FILE}", None)
    return sizes


def _read(folder: Path) -> RecoveryPoint:
    """The point in a folder.

    Raises:
        CheckpointError: a file is missing, too short or too long, or the state is damaged.
    """
    state, found = read_state(folder), _sizes(folder)
    try:
        wanted: dict[str, int] = state["sizes"]
        point = RecoveryPoint(folder, StepInfo(**state["at"]), state["states"], state["rng"], state["rhythm"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"its state has no usable {error}") from error
    wrong = [name for name in wanted if found.get(name) != wanted[name]]
    if wrong:
        raise CheckpointError(f"{wrong[0]} has {found.get(wrong[0], 'no')} bytes instead of {wanted[wrong[0]]}")
    return point
