"""The folder with a run's checkpoints: ``step_000123/``, and optionally ``best/``. Each checkpoint is complete or absent.

A checkpoint is written under a temporary name, synced to disk, and then renamed. To delete a checkpoint, its folder is first
renamed to a temporary name. When a checkpoint is replaced, the old checkpoint gets a temporary name, and is deleted last. If
the process is killed, the next start or save removes the folders with temporary names. But if the process was killed before
the new checkpoint got its final name, the old checkpoint gets its name back.

If ``best`` and a ``step_...`` checkpoint have the same step, they share files as hard links, if the file system supports these.
Therefore, files are replaced and never modified in place.

A checkpoint is damaged if a file is missing or has wrong contents. A resumed run uses the newest undamaged checkpoint, and
renames newer, damaged checkpoints to ``.damaged-...``. If a checkpoint cannot be read because of an I/O error, the run ends
instead of using an older checkpoint, because the cause of the error may be temporary.
"""

import itertools
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from areno.errors import CheckpointError, DamagedCheckpointError
from areno.storage.contents import STATE_FILE, STATE_FOLDER, check_files, read_state, write_manifest

_log = logging.getLogger(__name__)

DISK_REMEDY = "free some space, keep fewer checkpoints with --keep-checkpoints, or choose another --save-path"
_NAME = re.compile(r"step_(\d{6,})")
_BEST = "best"
_PARTIAL, _REPLACED, _TRASH = ".partial-", ".replaced-", ".trash-"
# Folders with these prefixes stay until the user deletes them.
_DAMAGED, _REWOUND = ".damaged-", ".rewound-"
# Reserved space for tokenizer files, rounding and file system overhead.
_DISK_SLACK = 64 * 1024 * 1024


class CheckpointFolder:
    """Manages the checkpoints of a run in the folder ``root``. The first save creates this folder.

    Only the newest ``keep`` checkpoints are kept, or all checkpoints if ``keep`` is None.
    """

    def __init__(
        self,
        root: str | Path,
        keep: int | None = None,
        remedy: str = DISK_REMEDY,
    ) -> None:
        self.root = Path(root)
        self.best = self.root / _BEST  # the checkpoint with the best evaluation
        self.keep = keep
        self.sound_until: int | None = None  # steps completed before the first failed update; None: none failed
        self._remedy = remedy  # advice if the disk is full

    def path(self, step: int) -> Path:
        """Return the path of the checkpoint after ``step`` completed steps."""
        return self.root / f"step_{step:06d}"

    def steps(self) -> list[int]:
        """Return the step numbers of the complete ``step_...`` checkpoints, in ascending order."""
        if not self.root.is_dir():
            return []
        matches = ((_NAME.fullmatch(entry.name), entry) for entry in self.root.iterdir())
        return sorted(
            int(match[1]) for match, entry in matches if match and (entry / STATE_FOLDER / STATE_FILE).is_file()
        )

    def best_step(self) -> int | None:
        """Return the number of steps completed before the best checkpoint was saved; None if there is no best checkpoint."""
        return read_state(self.best)["step"] if (self.best / STATE_FOLDER / STATE_FILE).is_file() else None

    def find(self, step: int) -> Path | None:
        """Return the path of the complete checkpoint after ``step`` completed steps; None if there is no such checkpoint."""
        if self.best_step() == step:
            return self.best
        return self.path(step) if step in self.steps() else None

    def newest_until(self, step: int) -> tuple[int, Path] | None:
        """Return the step and the path of the newest undamaged checkpoint that is not later than ``step``; None if there is
        no such checkpoint."""
        checkpoints = [(saved, self.path(saved)) for saved in self.steps()]
        with suppress(DamagedCheckpointError):
            if (best := self.best_step()) is not None:
                checkpoints.append((best, self.best))
        for saved, path in sorted(checkpoints, reverse=True):
            if saved <= step:
                try:
                    _check(path)
                    return saved, path
                except DamagedCheckpointError as error:
                    _log.warning("the checkpoint %s is damaged and not used: %s", path, error)
        return None

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint, either ``step_...`` or ``best``; None without checkpoints."""
        steps, best = self.steps(), self.best_step()
        if best is not None and (not steps or best > steps[-1]):
            return self.best
        return self.path(steps[-1]) if steps else None

    def to_resume(self, step: int | None = None, check: Callable[[Path], Any] | None = None) -> Path | None:
        """Return the newest undamaged checkpoint; None without checkpoints.

        Newer, damaged checkpoints are renamed to ``.damaged-...``.

        Args:
            step: if set, only checkpoints with exactly this number of completed steps are considered.
            check: function that raises ``DamagedCheckpointError`` for an unusable checkpoint. The default function checks the
                state and the manifest.

        Raises:
            CheckpointError: all considered checkpoints are damaged, or a checkpoint cannot be read because of an I/O error or
                an unsupported format.
        """
        damaged: list[tuple[Path, str]] = []
        for path_step, path in self._newest_first():
            if step is not None and path_step != step:
                continue
            try:
                (check or _check)(path)
            except DamagedCheckpointError as error:
                damaged.append((path, str(error)))
                continue
            for bad, reason in damaged:
                hidden = self._set_aside(bad, _DAMAGED)
                _log.warning(
                    "%s is damaged (%s) and was renamed to %s; using %s instead", bad, reason, hidden.name, path
                )
            return path
        if damaged:
            remedy = "restore a backup, or start a new run" if step is None else "choose another --resume-step"
            reasons = "; ".join(reason for _, reason in damaged)
            raise CheckpointError(f"no checkpoint under {self.root} can be used: {reasons}; {remedy}")
        return None

    def rewind(self, step: int) -> None:
        """Rename the checkpoints of the steps after ``step`` to ``.rewound-...``, because the run repeats these steps."""
        for path_step, path in self._newest_first():
            if path_step > step:
                hidden = self._set_aside(path, _REWOUND)
                _log.warning(
                    "checkpoint %s was renamed to %s, because the run resumes from the earlier step %d",
                    path,
                    hidden.name,
                    step,
                )

    def _newest_first(self) -> list[tuple[int, Path]]:
        """Return steps and folders of all checkpoints, also of incomplete checkpoints, newest first.

        If ``best`` and another checkpoint have the same step, ``best`` follows the other checkpoint in the list.

        A damaged ``best`` cannot be sorted, because its step is unknown. If there are other checkpoints, it is renamed to
        ``.damaged-best`` and not returned. Otherwise, it is returned with step 0.
        """
        if not self.root.is_dir():
            return []
        folders = [(int(match[1]), entry) for entry in self.root.iterdir() if (match := _NAME.fullmatch(entry.name))]
        if self.best.is_dir():
            try:
                folders.append((int(read_state(self.best)["step"]), self.best))
            except (DamagedCheckpointError, KeyError) as error:
                if not folders:
                    return [(0, self.best)]
                hidden = self._set_aside(self.best, _DAMAGED)
                _log.warning("%s is damaged (%s) and was renamed to %s", self.best, error, hidden.name)
        return sorted(folders, key=lambda pair: (pair[0], pair[1] != self.best), reverse=True)

    def _set_aside(self, path: Path, prefix: str) -> Path:
        names = (f"{prefix}{path.name}{'' if number == 1 else f'-{number}'}" for number in itertools.count(1))
        target = next(target for target in map(self.root.joinpath, names) if not target.exists())
        os.replace(path, target)
        return target

    def clear_leftovers(self) -> None:
        """Delete the temporary folders of interrupted saves and deletions, and restore checkpoints whose replacement failed."""
        if not self.root.is_dir():
            return
        for entry in list(self.root.iterdir()):
            name = entry.name.removeprefix(_REPLACED)
            if name != entry.name and not (self.root / name).exists():
                os.replace(entry, self.root / name)
            elif entry.name.startswith((_PARTIAL, _REPLACED, _TRASH)):
                shutil.rmtree(entry, ignore_errors=True)

    def prune(self) -> None:
        """Delete the oldest ``step_...`` checkpoints if there are more than ``self.keep``.

        After a failed update, the newest checkpoint from before this update is kept too. ``sound_until`` is the number of steps
        that were completed before the failed update.

        Raises CheckpointError if a checkpoint cannot be deleted.
        """
        if self.keep is None:
            return
        steps = self.steps()
        sound = max((step for step in steps if step <= self.sound_until), default=None) if self.sound_until else None
        for old in steps[: -self.keep]:
            if old != sound:
                try:
                    self.remove(old)
                except OSError as error:
                    raise CheckpointError(
                        f"the checkpoint {self.path(old)} cannot be deleted: {error}; check the permissions of the folder"
                    ) from error

    @contextmanager
    def writing(self, step: int, needed_bytes: int, *, copy_of: Path | None = None) -> Iterator[Path]:
        """Yield a folder that the ``with`` block fills.

        At first, the folder is empty, or contains hard links or copies of the files of ``copy_of``. If the block ends without
        an error, the folder becomes the checkpoint of ``step``.

        Raises:
            CheckpointError: the disk has less than ``needed_bytes`` plus 64 MiB free, or a write or a deletion failed.
        """
        with self._writing(self.path(step), needed_bytes, copy_of) as folder:
            yield folder
        self.prune()

    def writing_best(self, needed_bytes: int, *, copy_of: Path | None = None) -> AbstractContextManager[Path]:
        """Like :meth:`writing`, but replace the best checkpoint.

        The limit ``keep`` of :class:`CheckpointFolder` does not apply to the best checkpoint.
        """
        return self._writing(self.best, needed_bytes, copy_of)

    def writing_named(self, name: str, needed_bytes: int) -> AbstractContextManager[Path]:
        """Like :meth:`writing`, but for a model in the folder ``name``, without training state and without a manifest."""
        return self._writing(self.root / name, needed_bytes, None, has_state=False)

    def remove(self, step: int) -> None:
        """Delete the checkpoint of a step.

        If the process is killed during the deletion, the checkpoint is either intact, or already renamed and thus ignored.
        """
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
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"writing the checkpoint {target} failed: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _check_disk(self, needed: int) -> None:
        free = shutil.disk_usage(self.root).free
        if free < needed + _DISK_SLACK:
            raise CheckpointError(
                f"a checkpoint needs {needed / 2**20:.1f} MiB plus a reserve of {_DISK_SLACK / 2**20:.0f} MiB, but "
                f"{self.root} has {free / 2**20:.0f} MiB free; {self._remedy}"
            )

    def _replace(self, target: Path, new: Path) -> None:
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
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def sync_tree(folder: Path) -> None:
    """Flush a folder and all its files to disk, so that a power failure loses no data."""
    for parent, _, files in os.walk(folder):
        for name in (*files, "."):
            _sync(Path(parent, name))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
