"""Saves rollouts: ``rollouts/step_000012.safetensors`` contains the arrays of the rows that step 12 trained on.

Each file is either complete or absent. Steps count from 0, as in ``metrics.jsonl``.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from areno.errors import ArenoError
from areno.storage.files import replacing

_NAME = re.compile(r"step_(\d{6,})\.safetensors")
_FORMAT = {"format": "areno rollouts 1"}
Arrays = dict[str, NDArray[Any]]


class RolloutFiles:
    """Manages the saved rollouts of a run in ``folder``. The first write creates this folder.

    Only the rollouts of the newest ``keep`` steps are kept.
    """

    def __init__(self, folder: Path, keep: float) -> None:
        self.folder, self.keep = folder, keep

    def path(self, step: int) -> Path:
        """Return the path of the file that contains the rollouts of ``step``."""
        return self.folder / f"step_{step:06d}.safetensors"

    def steps(self) -> list[int]:
        """Return the steps whose rollouts are saved, in ascending order."""
        names = (path.name for path in self.folder.iterdir()) if self.folder.is_dir() else ()
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)

    def write(self, step: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Save the arrays of a step, and delete the oldest files if there are more than ``self.keep``.

        Raises ArenoError on failure.
        """
        path = self.path(step)
        try:
            self.folder.mkdir(exist_ok=True)
            with replacing(path) as temporary:
                save_file(dict(arrays), temporary, _FORMAT)
            steps = self.steps()
            for old in steps[: max(len(steps) - int(min(self.keep, len(steps))), 0)]:
                self.path(old).unlink(missing_ok=True)
        except (OSError, SafetensorError) as error:
            raise ArenoError(
                f"cannot write {path}: {error}; check free disk space, or save fewer steps with --save-rollouts "
                "(rollout.save_rollouts)"
            ) from error

    def read(self, step: int) -> Arrays:
        """Return the arrays of a step. Raises ArenoError if the file is missing or damaged."""
        path = self.path(step)
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise ArenoError(f"{path} cannot be read: {error}") from error

    def drop_after(self, step: int) -> None:
        """Delete the files of the steps after ``step``."""
        for later in self.steps():
            if later > step:
                self.path(later).unlink(missing_ok=True)
