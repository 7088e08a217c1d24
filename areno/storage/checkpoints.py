"""The checkpoint root: ``step_000123/`` folders, and ``best/`` where a run keeps one, that are complete or absent.

A checkpoint is written under a temporary name and renamed when its last byte is on the disk. What is to go is renamed first
and deleted afterwards. Whatever a kill leaves therefore starts with a dot, and is cleared away at the next start; one that
is being replaced is deleted last, and put back where a kill fell between the two renames. Two checkpoints of one step share
their files by hard links where the file system has them, so a file of a checkpoint is replaced, never written into.

A checkpoint whose files are not what was written is never loaded and never deleted: it is renamed to ``.damaged-...``, and
the one before it is taken. One that cannot be read ends the run, because the next attempt may be able to.
"""

import itertools
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from areno.errors import CheckpointError, DamagedCheckpointError
from areno.storage.contents import STATE_FILE, STATE_FOLDER, check_files, read_state, write_manifest

_log = logging.getLogger(__name__)

_NAME = re.compile(r"step_(\d{6,})")
_BEST = "best"
_PARTIAL, _REPLACED, _TRASH = ".partial-", ".replaced-", ".trash-"
# Kept until the user deletes them.
_DAMAGED, _REWOUND = ".damaged-", ".rewound-"
# Room for tokenizer files, rounding and the file system's own needs.
_DISK_SLACK = 64 * 1024 * 1024


class CheckpointFolder:
    """All checkpoints of one run below ``root``, which is made when first needed; all are kept, or the newest ``keep``."""

    def __init__(
        self,
        root: str | Path,
        keep: int | None = None,
        remedy: str = "free some space, use --keep-checkpoints, or choose another --save-path",
    ) -> None:
        self.root = Path(root)
        self.best = self.root / _BEST  # where the checkpoint with the best evaluation lies
        self.keep = keep
        self.sound_until: int | None = None  # the newest one after at most so many completed steps is kept too
        self._remedy = remedy  # where the disk is full

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

    def to_resume(self, step: int | None = None, check: Callable[[Path], Any] | None = None) -> Path | None:
        """The newest checkpoint (None: there is none) that is what was written; newer ones are renamed to ``.damaged-...``.

        Args:
            step: look at the checkpoint after so many completed steps alone.
            check: raises ``DamagedCheckpointError`` for one that must not be used; None asks its manifest.

        Raises:
            CheckpointError: there are checkpoints and none can be used (they keep their names), or one cannot be read.
        """
        damaged: list[tuple[Path, str]] = []
        for found, path in self._newest_first():
            if step is not None and found != step:
                continue
            try:
                (check or _check)(path)
            except DamagedCheckpointError as error:
                damaged.append((path, str(error)))
                continue
            for bad, reason in damaged:
                kept = self._set_aside(bad, _DAMAGED)
                _log.warning("%s is damaged (%s); it is kept as %s, and %s is used", bad, reason, kept.name, path)
            return path
        if damaged:
            remedy = "put a copy back, or begin a new run" if step is None else "choose another --resume-step"
            reasons = "; ".join(reason for _, reason in damaged)
            raise CheckpointError(f"no checkpoint under {self.root} can be used: {reasons}; {remedy}")
        return None

    def rewind(self, step: int) -> None:
        """Rename the checkpoints of later steps than ``step`` to ``.rewound-...``: the run goes another way from there."""
        for found, path in self._newest_first():
            if found > step:
                kept = self._set_aside(path, _REWOUND)
                _log.warning(
                    "%s is of a later step than %d, from which the run goes on; kept as %s", path, step, kept.name
                )

    def _newest_first(self) -> list[tuple[int, Path]]:
        """Steps and folders of all that bear a checkpoint's name, whole or not; of two of one step, the best comes last."""
        if not self.root.is_dir():
            return []
        found = [(int(match[1]), entry) for entry in self.root.iterdir() if (match := _NAME.fullmatch(entry.name))]
        if self.best.is_dir():
            try:
                found.append((int(read_state(self.best)["step"]), self.best))
            except (DamagedCheckpointError, KeyError) as error:
                if not found:
                    return [(0, self.best)]
                kept = self._set_aside(self.best, _DAMAGED)
                _log.warning("%s is damaged (%s); it is kept as %s", self.best, error, kept.name)
        return sorted(found, key=lambda one: (one[0], one[1] != self.best), reverse=True)

    def _set_aside(self, path: Path, prefix: str) -> Path:
        """Give a checkpoint a hidden name that is free; returns where it is then."""
        names = (f"{prefix}{path.name}{'' if number == 1 else f'-{number}'}" for number in itertools.count(1))
        target = next(target for target in map(self.root.joinpath, names) if not target.exists())
        os.replace(path, target)
        return target

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
        """Delete the oldest checkpoints beyond those to keep, also one that a kill right after a save has left."""
        if self.keep is None:
            return
        steps = self.steps()
        sound = max((step for step in steps if step <= self.sound_until), default=None) if self.sound_until else None
        for old in steps[: -self.keep]:
            if old != sound:
                self.remove(old)

    @contextmanager
    def writing(self, step: int, needed_bytes: int, *, copy_of: Path | None = None) -> Iterator[Path]:
        """Yield a folder to fill; it becomes the checkpoint of ``step`` when the block ends without an error.

        It begins with the files of ``copy_of``, as hard links or copies, or empty. Raises CheckpointError: the disk has less
        than ``needed_bytes`` free, or a write failed.
        """
        with self._writing(self.path(step), needed_bytes, copy_of) as folder:
            yield folder
        self.prune()

    def writing_best(self, needed_bytes: int, *, copy_of: Path | None = None) -> AbstractContextManager[Path]:
        """:meth:`writing` for the best checkpoint, which replaces the one before and is never counted among the newest."""
        return self._writing(self.best, needed_bytes, copy_of)

    def writing_named(self, name: str, needed_bytes: int) -> AbstractContextManager[Path]:
        """:meth:`writing` for a model under any other name, never counted among the checkpoints, and without a manifest."""
        return self._writing(self.root / name, needed_bytes, None, has_state=False)

    def remove(self, step: int) -> None:
        """Delete the checkpoint of a step; a kill leaves it whole or hidden."""
        trash = self.root / f"{_TRASH}{self.path(step).name}"
        shutil.rmtree(trash, ignore_errors=True)
        os.replace(self.path(step), trash)
        shutil.rmtree(trash, ignore_errors=True)

    @contextmanager
    def _writing(
        self, target: Path, needed_bytes: int, copy_of: Path | None, *, has_state: bool = True
    ) -> Iterator[Path]:
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
            if has_state and copy_of is None:
                write_manifest(partial)
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
                f"a checkpoint needs {needed / 2**20:.1f} MiB beside the {_DISK_SLACK / 2**20:.0f} MiB that stay free, and "
                f"{self.root} has {free / 2**20:.0f} MiB free; {self._remedy}"
            )

    def _replace(self, target: Path, new: Path) -> None:
        """Give ``new`` the name ``target``; the old one is deleted when that is done, and not before."""
        old = self.root / f"{_REPLACED}{target.name}"
        if target.exists():
            os.replace(target, old)
        os.replace(new, target)
        _sync(self.root)
        shutil.rmtree(old, ignore_errors=True)


def _check(checkpoint: Path) -> None:
    read_state(checkpoint)
    check_files(checkpoint)


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
