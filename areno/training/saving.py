"""Saves models in Hugging Face format. The folder of a model is ``models/step_000100`` in ``areno train``, and
``default/epoch{E}epochstep{S}globalstep{G}`` in ``areno run``.

Each role has its own save schedule. A folder gets its final name only when it is complete. Asynchronous saving first waits for
the role's previous save, and then copies the weights. Training waits only until the copy exists. A thread writes the copy.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from areno.errors import UsageError
from areno.spec.run_spec import Frequency
from areno.storage.checkpoint_folder import CheckpointFolder
from areno.storage.run_layout import EXPERIMENT, RunLayout
from areno.training.frequency import FrequencyControl, StepInfo

_log = logging.getLogger(__name__)

MODES = ("auto", "sync", "async")
DISK_REMEDY = "free some space, save less often (saver.freq_*), or choose another cluster.fileroot"

WriteModel = Callable[[Path], None]
"""A function that writes a model and its tokenizer to a folder."""
StageModel = Callable[[], WriteModel]
"""A function that copies a model's weights, and returns a function that writes the copy."""


class Saver:
    """Saves the model of each role when a save is due. The role ``default`` is the policy (the actor).

    Args:
        root: folder for the models of the run.
        every: how often each role is saved.
        mode: ``sync`` blocks until the model is written. ``async`` and ``auto`` copy the weights, and write them in a thread.
            A model that cannot be copied, such as a model with an adapter, is saved as with ``sync``; in this case, ``async``
            logs a warning.
        layout: the names of the folders, which differ between ``areno train`` and ``areno run``.
        remedy: advice in the error message for a full disk.
    """

    def __init__(
        self,
        root: str | Path,
        every: Frequency,
        roles: Iterable[str] = ("default",),
        mode: str = "auto",
        layout: RunLayout = EXPERIMENT,
        remedy: str = DISK_REMEDY,
    ) -> None:
        if mode not in MODES:
            raise UsageError(f"saver.mode={mode!r} is unknown; use one of {', '.join(MODES)}")
        self._root = Path(root)
        self._controls = {role: FrequencyControl(every) for role in roles}
        self._mode, self._layout, self._remedy = mode, layout, remedy
        self._writer: ThreadPoolExecutor | None = None
        self._under_way: dict[str, Future[None]] = {}

    def path(self, role: str, at: StepInfo) -> Path:
        """Return the folder in which the model of a role is saved after a step."""
        numbers = {"epoch": at.epoch, "epoch_step": at.epoch_step, "global_step": at.global_step}
        name = self._layout.model.format(steps=at.global_step + 1, **numbers)
        return self._root / self._layout.models.format(role=role) / name

    def save_if_due(
        self, role: str, at: StepInfo, write: WriteModel, *, stage: StageModel | None = None
    ) -> Path | None:
        """Count a finished step in the save schedule of a role.

        If a save is due, call :meth:`save` and return the path; otherwise, return None.
        """
        due = self._controls[role].check(at)
        return self.save(role, at, write, stage=stage) if due else None

    def save(self, role: str, at: StepInfo, write: WriteModel, *, stage: StageModel | None = None) -> Path:
        """Save a role's model, and return its path.

        In the modes ``async`` and ``auto``, ``stage`` copies the model, and a thread writes the copy. If ``stage`` is None, the
        model cannot be copied, so this method writes it with ``write``, as in the mode ``sync``.

        Raises:
            CheckpointError: this save or the previous asynchronous save of the role failed.
        """
        if self._mode == "async" and stage is None:
            _log.warning(
                "saver.mode=async: the model of role %s cannot be copied, so training waits until the model is written",
                role,
            )
        self._wait(role)
        if self._mode == "sync" or stage is None:
            self._write(role, at, write)
        else:
            self._writer = self._writer or ThreadPoolExecutor(1, thread_name_prefix="areno-saver")
            self._under_way[role] = self._writer.submit(self._write, role, at, stage())
        return self.path(role, at)

    def wait(self) -> None:
        """Wait until all models are written. Raises CheckpointError if a save failed."""
        for role in list(self._under_way):
            self._wait(role)

    def close(self) -> None:
        """Call :meth:`wait`, then stop the thread that writes models."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.shutdown()
                self._writer = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each role's save schedule, for a checkpoint."""
        return {role: control.state_dict() for role, control in self._controls.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the save schedules in ``state``. The save schedule of a role that is not in ``state`` is unchanged."""
        for role, control in self._controls.items():
            if role in state:
                control.load_state_dict(state[role])

    def _wait(self, role: str) -> None:
        future = self._under_way.pop(role, None)
        if future is not None:
            future.result()

    def _write(self, role: str, at: StepInfo, write: WriteModel) -> None:
        path = self.path(role, at)
        with CheckpointFolder(path.parent, remedy=self._remedy).writing_named(path.name, 0) as folder:
            write(folder)
        _log.info("saved the model of role %s after global step %d in %s", role, at.global_step + 1, path)
