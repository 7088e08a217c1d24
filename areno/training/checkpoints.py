"""Checkpoints of a run: everything that it needs to go on where it was, and the one with the best evaluation.

One is a folder of ``areno.storage.checkpoints`` (temporary name, flushed to the disk, renamed), with

    model.safetensors, ...     the model in Hugging Face format, with its tokenizer
    trainer_state/             optimizers; ``state.json``, the :class:`RunState`; SHA-256 of every other file
    rollout.pt                 with asynchronous rollout: finished but unused trajectories, queue, versions

Special here: a checkpoint counts when each of its files is what was written; one that is damaged is set aside and the one
before it is taken. Nothing that is read can run code. Looking for a checkpoint makes no folder.
"""

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from areno.engine.backend import Backend
from areno.errors import CheckpointError
from areno.spec.run_spec import CheckpointSpec
from areno.storage.checkpoints import CheckpointFolder
from areno.storage.contents import check_files, write_state
from areno.training import plain_objects
from areno.training.frequency import FrequencyControl, StepInfo
from areno.training.state import RunState

_ROLLOUT = "rollout.pt"


class Checkpoints:
    """Writes and finds the checkpoints of one run.

    ``writing`` is called with the path around each save, to show it; ``saved_step`` counts the completed steps of this
    process's newest checkpoint, 0 without one.
    """

    def __init__(self, spec: CheckpointSpec) -> None:
        self.spec = spec
        self.folder = CheckpointFolder(spec.folder, spec.newest, spec.remedy)
        self.frequency = FrequencyControl(spec.every)
        self.writing: Callable[[Path], AbstractContextManager[None]] = lambda path: nullcontext()
        self.saved_step = 0

    def find(self, step: int | None = None) -> Path | None:
        """The newest checkpoint that is what was written, or the one of a step; None where there is none.

        Raises CheckpointError: there are some and none can be used, one is unreadable, or others can write to them.
        """
        if not self.spec.enabled:
            return None
        if self.spec.strict:
            _refuse_foreign(self.folder.root)
        self.folder.clear_leftovers()  # may put a checkpoint back, which is then the newest
        return self.folder.to_resume(step, self._check)

    def _check(self, checkpoint: Path) -> None:
        RunState.of_checkpoint(checkpoint)
        check_files(checkpoint, required=self.spec.strict)

    def resume(self, checkpoint: Path, state: RunState) -> None:
        """Count what the run has, which goes on from a checkpoint; those of later steps are renamed."""
        self.saved_step = state.step if checkpoint != self.folder.best else 0
        self.folder.sound_until = state.unusable
        self.folder.rewind(state.step)
        self.folder.prune()

    def due(self, at: StepInfo) -> bool:
        """Count a finished step; whether a checkpoint is to be written after it."""
        return self.frequency.check(at) and self.spec.enabled

    def save(self, state: RunState, backend: Backend, rollout_state: Callable[[], Any] = lambda: None) -> Path:
        """Write the checkpoint of the last completed step, unless that is done already.

        ``rollout_state`` gives what :func:`areno.training.plain_objects.save` can hold; None writes nothing. Raises
        :class:`CheckpointError` if the disk is full, or a write failed.
        """
        step, path = state.step, self.folder.path(state.step)
        if step == self.saved_step:
            return path
        best = self.folder.best if self.folder.best_step() == step else None
        with (
            self.writing(path),
            self.folder.writing(step, _needed_bytes(backend, best), copy_of=best) as folder,
        ):
            self._fill(folder, state, backend, best, rollout_state)
        self.saved_step = step
        return path

    def save_best(self, state: RunState, backend: Backend, rollout_state: Callable[[], Any] = lambda: None) -> None:
        """Keep the last completed step as the best one; arguments and errors as for :meth:`save`."""
        same = self.folder.path(state.step) if state.step == self.saved_step else None
        with (
            self.writing(self.folder.best),
            self.folder.writing_best(_needed_bytes(backend, same), copy_of=same) as folder,
        ):
            self._fill(folder, state, backend, same, rollout_state)

    def update(self, state: RunState) -> None:
        """Replace the state of the last completed step's checkpoint, where there is one: it has been evaluated since."""
        if state.step and state.step == self.saved_step:
            write_state(self.folder.path(state.step), asdict(state))

    def _fill(
        self, folder: Path, state: RunState, backend: Backend, copied: Path | None, rollout_state: Callable[[], Any]
    ) -> None:
        """Write the checkpoint; where the folder holds a copy of one of the same step, only what may differ."""
        if copied is None:
            backend.save_model(folder)
            if self.spec.saves_optimizer:
                backend.save_state(folder)
        if (found := rollout_state()) is not None:
            plain_objects.save(found, folder / _ROLLOUT)
        write_state(folder, asdict(state))


def rollout_state(checkpoint: Path) -> Any:
    """What a checkpoint holds of the rollout; None where it holds nothing."""
    file = checkpoint / _ROLLOUT
    return plain_objects.load(file) if file.exists() else None


def _needed_bytes(backend: Backend, copied: Path | None) -> int:
    return 0 if copied else backend.checkpoint_bytes()


def _refuse_foreign(root: Path) -> None:
    """Refuse a folder of checkpoints that another user owns or may write to."""
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
