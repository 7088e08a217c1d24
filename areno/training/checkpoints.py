"""Writes and finds the checkpoints of a run: checkpoints to resume from, and the checkpoint with the best evaluation.

A checkpoint is a folder, which ``areno.storage.checkpoint_folder`` writes atomically:

    model.safetensors, ...     the model in Hugging Face format, with its tokenizer
    trainer_state/             optimizer state, ``state.json`` (the :class:`RunState`), and a manifest with SHA-256 hashes
    rollout.pt                 unused samples and other state of the rollout, if any

A checkpoint is verified before use. A damaged checkpoint is renamed, and the previous checkpoint is used. Loading never runs
code from a file.
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
from areno.storage.checkpoint_folder import CheckpointFolder
from areno.storage.contents import check_files, list_again, write_state
from areno.training import plain_objects
from areno.training.frequency import FrequencyControl, StepInfo
from areno.training.state import RunState

_ROLLOUT = "rollout.pt"


class Checkpoints:
    """Writes and finds the checkpoints of one run.

    Each checkpoint is written inside the context manager that ``writing(path)`` returns. By default, this context manager does
    nothing. The training loop replaces ``writing``, to show on the progress display that a checkpoint is written.
    ``saved_step`` is the step of the newest ``step_...`` checkpoint that this process wrote or resumed from; 0 if there is
    none. The checkpoint ``best`` does not change ``saved_step``.
    """

    def __init__(self, spec: CheckpointSpec) -> None:
        self.spec = spec
        self.folder = CheckpointFolder(spec.folder, spec.newest, spec.remedy)
        self.frequency = FrequencyControl(spec.every)
        self.writing: Callable[[Path], AbstractContextManager[None]] = lambda path: nullcontext()
        self.saved_step = 0

    def find(self, step: int | None = None) -> Path | None:
        """Return the newest undamaged checkpoint, or the checkpoint of ``step``; None if checkpoints are missing or disabled.

        Raises:
            CheckpointError: the checkpoint of ``step`` is damaged, or ``step`` is None and every checkpoint is damaged. This
                error is also raised if a checkpoint cannot be read because of an I/O error or an unsupported format. With
                ``spec.strict``, it is also raised if a file belongs to another user or can be written to by all users.
        """
        if not self.spec.enabled:
            return None
        if self.spec.strict:
            _refuse_foreign(self.folder.root)
        self.folder.clear_leftovers()  # this may complete an interrupted save, which is then the newest checkpoint
        return self.folder.to_resume(step, self._check)

    def _check(self, checkpoint: Path) -> None:
        RunState.of_checkpoint(checkpoint)
        check_files(checkpoint, required=self.spec.strict)

    def resume(self, checkpoint: Path, state: RunState) -> None:
        """Prepare to continue from a checkpoint.

        Renames the checkpoints of the steps after ``state.step``, because the run repeats these steps. Deletes the oldest
        checkpoints if there are more than ``spec.newest``.
        """
        self.saved_step = state.step if checkpoint != self.folder.best else 0
        self.folder.sound_until = state.unusable
        self.folder.rewind(state.step)
        self.folder.prune()

    def due(self, at: StepInfo) -> bool:
        """Count a finished step, and return whether to write a checkpoint after this step."""
        return self.frequency.check(at) and self.spec.enabled

    def save(self, state: RunState, backend: Backend, rollout_state: Callable[[], Any] = lambda: None) -> Path:
        """Write the checkpoint of the last completed step, unless it exists, and return its path.

        ``rollout_state`` returns a value that :func:`areno.training.plain_objects.save` can write to ``rollout.pt``. If
        the value is None, no ``rollout.pt`` is written.

        Raises:
            CheckpointError: the disk is full, or a write failed.
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
        """Replace the best checkpoint by a checkpoint of the last completed step. See :meth:`save` for arguments and errors."""
        same = self.folder.path(state.step) if state.step == self.saved_step else None
        with (
            self.writing(self.folder.best),
            self.folder.writing_best(_needed_bytes(backend, same), copy_of=same) as folder,
        ):
            self._fill(folder, state, backend, same, rollout_state)

    def update(self, state: RunState) -> None:
        """After an evaluation, write ``state`` to the checkpoint of the last completed step, if this checkpoint exists."""
        if state.step and state.step == self.saved_step:
            write_state(self.folder.path(state.step), asdict(state))

    def newest(self) -> str:
        """Return a description of the newest checkpoint, for a message."""
        try:
            newest = max([*self.folder.steps(), self.folder.best_step() or 0])
        except (CheckpointError, OSError) as error:
            return f"the newest checkpoint cannot be read ({error})"
        return f"the newest checkpoint is from step {newest}" if newest else "there is no checkpoint yet"

    def _fill(
        self, folder: Path, state: RunState, backend: Backend, copied: Path | None, rollout_state: Callable[[], Any]
    ) -> None:
        """Write a checkpoint to a folder.

        If ``copied`` is None, write all files. Otherwise, ``copied`` is a checkpoint of the same step, and ``folder`` already
        contains a copy of its files. In this case, write only the state of the run and of the rollout.
        """
        if copied is None:
            backend.save_model(folder)
            if self.spec.saves_optimizer:
                backend.save_state(folder)
        file = folder / _ROLLOUT
        file.unlink(missing_ok=True)  # may be a hard link, so it must not be overwritten
        if (rollout := rollout_state()) is not None:
            plain_objects.save(rollout, file)
        if copied is not None:
            list_again(folder, _ROLLOUT)
        write_state(folder, asdict(state))


def rollout_state(checkpoint: Path) -> Any:
    """Return the rollout state in a checkpoint; None if the checkpoint has no rollout state."""
    file = checkpoint / _ROLLOUT
    return plain_objects.load(file) if file.exists() else None


def _needed_bytes(backend: Backend, copied: Path | None) -> int:
    return 0 if copied else backend.checkpoint_bytes()


def _refuse_foreign(root: Path) -> None:
    """Raise CheckpointError if ``root`` or a path below it belongs to another user, or can be written to by all users.

    Files and folders owned by the superuser (user id 0) are accepted.
    """
    if not root.exists():
        return
    mine = {0, os.geteuid(), _owner_of_new_files(root)}
    closed = not root.stat().st_mode & stat.S_IRWXO  # other users cannot access anything below
    for path in (root, *root.rglob("*")):
        status = path.lstat()
        if status.st_uid not in mine:
            raise CheckpointError(
                f"{path} belongs to user {status.st_uid}, so its content is not trusted; if the content is yours, change the "
                "owner with chown, otherwise delete the content or choose another trial_name"
            )
        if status.st_mode & stat.S_IWOTH and not closed and not path.is_symlink():
            raise CheckpointError(
                f"{path} can be written to by every user, so its content is not trusted; if you trust the content, run "
                f"`chmod -R o-w {root}`, otherwise delete the content"
            )


def _owner_of_new_files(root: Path) -> int:
    """Return the owner of new files in a folder. A file server may map this process's user id to another user id."""
    try:
        with tempfile.TemporaryFile(dir=root) as probe:
            return os.fstat(probe.fileno()).st_uid
    except OSError:
        return os.geteuid()
