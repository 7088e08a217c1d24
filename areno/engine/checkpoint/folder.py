"""The checkpoint root: ``step_000123/`` folders that are complete or absent.

A checkpoint is written under a temporary name and renamed when its last byte is there. What is to go is renamed first and
deleted afterwards. Whatever a kill leaves therefore starts with a dot, and is cleared away at the next start.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areno.errors import CheckpointError

STATE_FOLDER = "trainer_state"
STATE_FILE = "state.json"
_NAME = re.compile(r"step_(\d{6,})")
_PARTIAL, _TRASH = ".partial-", ".trash-"
# Room for tokenizer files, rounding and the file system's own needs.
_DISK_SLACK = 64 * 1024 * 1024


class CheckpointFolder:
    """All checkpoints of one run.

    Args:
        root: folder that holds them; made when first needed.
        keep: newest checkpoints to keep; None keeps all.
    """

    def __init__(self, root: str | Path, keep: int | None = None) -> None:
        self.root = Path(root)
        self.keep = keep

    def path(self, step: int) -> Path:
        """Where the checkpoint after ``step`` completed steps lies."""
        return self.root / f"step_{step:06d}"

    def steps(self) -> list[int]:
        """Completed-step numbers of all complete checkpoints, ascending."""
        if not self.root.is_dir():
            return []
        found = ((_NAME.fullmatch(entry.name), entry) for entry in self.root.iterdir())
        return sorted(
            int(match[1]) for match, entry in found if match and (entry / STATE_FOLDER / STATE_FILE).is_file()
        )

    def latest(self) -> Path | None:
        """Newest complete checkpoint."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def clear_leftovers(self) -> None:
        """Delete what an interrupted save or deletion left behind."""
        if self.root.is_dir():
            for entry in self.root.iterdir():
                if entry.name.startswith((_PARTIAL, _TRASH)):
                    shutil.rmtree(entry, ignore_errors=True)

    @contextmanager
    def writing(self, step: int, needed_bytes: int) -> Iterator[Path]:
        """Yield an empty folder to fill; it becomes the checkpoint of ``step`` when the block ends without an error.

        Raises:
            CheckpointError: the disk has less than ``needed_bytes`` free, or a write failed.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.clear_leftovers()
            self._check_disk(needed_bytes)
            partial = self.root / f"{_PARTIAL}{self.path(step).name}"
            partial.mkdir()
        except OSError as error:
            raise CheckpointError(f"cannot write a checkpoint under {self.root}: {error}") from error
        try:
            yield partial
            _sync_folder(partial)
            self._remove(self.path(step))
            os.replace(partial, self.path(step))
            _sync_folder(self.root)
        except OSError as error:
            raise CheckpointError(f"writing the checkpoint {self.path(step)} failed: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        if self.keep is not None:
            for old in self.steps()[: -self.keep]:
                self._remove(self.path(old))

    def _check_disk(self, needed: int) -> None:
        free = shutil.disk_usage(self.root).free
        if free < needed + _DISK_SLACK:
            raise CheckpointError(
                f"a checkpoint needs {needed / 2**20:.0f} MiB and {self.root} has {free / 2**20:.0f} MiB free; "
                "free some space, use --keep-checkpoints, or choose another --save-path"
            )

    def _remove(self, path: Path) -> None:
        if path.exists():
            trash = self.root / f"{_TRASH}{path.name}"
            shutil.rmtree(trash, ignore_errors=True)
            os.replace(path, trash)
            shutil.rmtree(trash, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    """Make a folder's entries survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_state(checkpoint: Path, state: dict[str, Any]) -> None:
    """Write the trainer's JSON state; it is what makes a checkpoint complete."""
    folder = checkpoint / STATE_FOLDER
    folder.mkdir(exist_ok=True)
    (folder / STATE_FILE).write_text(json.dumps(state, indent=1), encoding="utf-8")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Read what :func:`write_state` wrote.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = checkpoint / STATE_FOLDER / STATE_FILE
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); resume from another checkpoint") from error
