"""The checkpoint root: ``step_000123/`` folders, and ``best/`` where a run keeps one, that are complete or absent.

A checkpoint is written under a temporary name and renamed when its last byte is on the disk. What is to go is renamed first
and deleted afterwards. Whatever a kill leaves therefore starts with a dot, and is cleared away at the next start; one that
is being replaced is deleted last, and put back where a kill fell between the two renames. Two checkpoints of one step share
their files by hard links where the file system has them, so a file of a checkpoint is replaced, never written into.
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
_BEST = "best"
_PARTIAL, _REPLACED, _TRASH = ".partial-", ".replaced-", ".trash-"
# Room for tokenizer files, rounding and the file system's own needs.
_DISK_SLACK = 64 * 1024 * 1024


class CheckpointFolder:
    """All checkpoints of one run.

    Args:
        root: folder that holds them; made when first needed.
        keep: newest checkpoints to keep; None keeps all.
        remedy: what helps where the disk is full.
    """

    def __init__(
        self,
        root: str | Path,
        keep: int | None = None,
        remedy: str = "free some space, use --keep-checkpoints, or choose another --save-path",
    ) -> None:
        self.root = Path(root)
        self.keep = keep
        self._remedy = remedy

    def path(self, step: int) -> Path:
        """Where the checkpoint after ``step`` completed steps lies."""
        return self.root / f"step_{step:06d}"

    @property
    def best(self) -> Path:
        """Where the checkpoint with the best evaluation lies."""
        return self.root / _BEST

    def steps(self) -> list[int]:
        """Completed-step numbers of all complete checkpoints, ascending."""
        if not self.root.is_dir():
            return []
        found = ((_NAME.fullmatch(entry.name), entry) for entry in self.root.iterdir())
        return sorted(
            int(match[1]) for match, entry in found if match and (entry / STATE_FOLDER / STATE_FILE).is_file()
        )

    def best_step(self) -> int | None:
        """Completed steps of the best checkpoint; None if there is none."""
        return read_state(self.best)["step"] if (self.best / STATE_FOLDER / STATE_FILE).is_file() else None

    def find(self, step: int) -> Path | None:
        """The complete checkpoint after ``step`` completed steps, where there is one."""
        if self.best_step() == step:
            return self.best
        return self.path(step) if step in self.steps() else None

    def latest(self) -> Path | None:
        """Newest complete checkpoint; that is the best one where no other was saved since."""
        steps, best = self.steps(), self.best_step()
        if best is not None and (not steps or best > steps[-1]):
            return self.best
        return self.path(steps[-1]) if steps else None

    def clear_leftovers(self) -> None:
        """Delete what an interrupted save or deletion left behind, after putting back what was about to be replaced."""
        if not self.root.is_dir():
            return
        for entry in list(self.root.iterdir()):
            name = entry.name.removeprefix(_REPLACED)
            if name != entry.name and not (self.root / name).exists():
                os.replace(entry, self.root / name)
            elif entry.name.startswith((_PARTIAL, _REPLACED, _TRASH)):
                shutil.rmtree(entry, ignore_errors=True)

    def prune(self) -> None:
        """Delete the oldest checkpoints beyond those to keep; a kill right after a save leaves one of them."""
        if self.keep is not None:
            for old in self.steps()[: -self.keep]:
                self.remove(old)

    @contextmanager
    def writing(self, step: int, needed_bytes: int, *, copy_of: Path | None = None) -> Iterator[Path]:
        """Yield a folder to fill; it becomes the checkpoint of ``step`` when the block ends without an error.

        Args:
            step: completed steps.
            needed_bytes: free space that it takes.
            copy_of: checkpoint whose files the folder holds to begin with, as hard links or copies; None begins empty.

        Raises:
            CheckpointError: the disk has less than ``needed_bytes`` free, or a write failed.
        """
        with self._writing(self.path(step), needed_bytes, copy_of) as folder:
            yield folder
        self.prune()

    @contextmanager
    def writing_best(self, needed_bytes: int, *, copy_of: Path | None = None) -> Iterator[Path]:
        """:meth:`writing` for the best checkpoint, which replaces the one before and is never counted among the newest."""
        with self._writing(self.best, needed_bytes, copy_of) as folder:
            yield folder

    @contextmanager
    def writing_named(self, name: str, needed_bytes: int) -> Iterator[Path]:
        """:meth:`writing` for a folder of any other name, which is never counted among the checkpoints."""
        with self._writing(self.root / name, needed_bytes, None) as folder:
            yield folder

    def remove(self, step: int) -> None:
        """Delete the checkpoint of a step; a kill leaves it whole or hidden."""
        trash = self.root / f"{_TRASH}{self.path(step).name}"
        shutil.rmtree(trash, ignore_errors=True)
        os.replace(self.path(step), trash)
        shutil.rmtree(trash, ignore_errors=True)

    @contextmanager
    def _writing(self, target: Path, needed_bytes: int, copy_of: Path | None) -> Iterator[Path]:
        partial = self.root / f"{_PARTIAL}{target.name}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.clear_leftovers()
            self._check_disk(needed_bytes)
            partial.mkdir()
        except OSError as error:
            raise CheckpointError(f"cannot write a checkpoint under {self.root}: {error}") from error
        try:
            if copy_of is not None:
                shutil.copytree(copy_of, partial, copy_function=_link_or_copy, dirs_exist_ok=True)
            yield partial
            sync_tree(partial)
            self._replace(target, partial)
        except OSError as error:
            raise CheckpointError(f"writing the checkpoint {target} failed: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _check_disk(self, needed: int) -> None:
        free = shutil.disk_usage(self.root).free
        if free < needed + _DISK_SLACK:
            raise CheckpointError(
                f"a checkpoint needs {needed / 2**20:.0f} MiB and {self.root} has {free / 2**20:.0f} MiB free; {self._remedy}"
            )

    def _replace(self, target: Path, new: Path) -> None:
        """Give ``new`` the name ``target``; the old one is deleted when that is done, and not before."""
        old = self.root / f"{_REPLACED}{target.name}"
        if target.exists():
            os.replace(target, old)
        os.replace(new, target)
        _sync(self.root)
        shutil.rmtree(old, ignore_errors=True)


def _link_or_copy(source: str, target: str) -> None:
    """A hard link, or a copy where the file system refuses one."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def sync_tree(folder: Path) -> None:
    """Make the files of a folder, and the folders themselves, survive a power cut."""
    for parent, _, files in os.walk(folder):
        for name in (*files, "."):
            _sync(Path(parent, name))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_state(checkpoint: Path, state: dict[str, Any]) -> None:
    """Write the trainer's JSON state, or replace it in one move; it is what makes a checkpoint complete."""
    folder = checkpoint / STATE_FOLDER
    folder.mkdir(exist_ok=True)
    temporary = folder / f"{STATE_FILE}.tmp"
    temporary.write_text(json.dumps(state, indent=1), encoding="utf-8")
    os.replace(temporary, folder / STATE_FILE)


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
