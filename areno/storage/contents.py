"""What is in a checkpoint besides the model: the trainer's state, and the SHA-256 of each file.

    trainer_state/state.json      the state as JSON, with a SHA-256 of its own
    trainer_state/manifest.json   {"files": {"model.safetensors": {"bytes": ..., "sha256": ...}, ...}}

Special here: the manifest leaves ``state.json`` out, because an evaluation may replace it later. Checkpoints that share
files by hard links share the manifest as well, so nothing is hashed twice.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from areno.errors import CheckpointError, DamagedCheckpointError

STATE_FOLDER = "trainer_state"
STATE_FILE = "state.json"
_MANIFEST = "manifest.json"
_UNLISTED = {f"{STATE_FOLDER}/{name}" for name in (STATE_FILE, _MANIFEST)}
_THREADS = 8
_DIGEST = "sha256"


def write_manifest(folder: Path) -> None:
    """Write the manifest of a checkpoint that is otherwise complete."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = sorted(name for name in paths if name not in _UNLISTED)
    digests = _digests(folder, names)
    files = {name: {"bytes": (folder / name).stat().st_size, _DIGEST: digests[name]} for name in names}
    (folder / STATE_FOLDER).mkdir(exist_ok=True)
    (folder / STATE_FOLDER / _MANIFEST).write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")


def check_files(folder: Path, *, required: bool = False) -> None:
    """Compare a checkpoint with its manifest; one without passes unless ``required``. Raises DamagedCheckpointError."""
    path = folder / STATE_FOLDER / _MANIFEST
    text = _read(path)
    if text is None:
        if required:
            raise DamagedCheckpointError(f"{path} is missing")
        return
    try:
        wanted = {str(name): (int(one["bytes"]), str(one[_DIGEST])) for name, one in json.loads(text)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path} is no manifest ({error})") from error
    try:
        for name, (size, _) in wanted.items():
            found = os.path.getsize(folder / name) if (folder / name).is_file() else "no"
            if found != size:
                raise DamagedCheckpointError(f"{folder / name} has {found} bytes instead of {size}")
        digests = _digests(folder, list(wanted))
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder} cannot be read ({error}); nothing was changed") from error
    for name, (_, digest) in wanted.items():
        if digests[name] != digest:
            raise DamagedCheckpointError(
                f"the content of {folder / name} is not what was written (its SHA-256 is another); if it was changed on "
                f"purpose, delete {path}"
            )


def write_state(checkpoint: Path, state: dict[str, Any]) -> None:
    """Write the trainer's JSON state, or replace it in one move; it is what makes a checkpoint complete."""
    folder = checkpoint / STATE_FOLDER
    folder.mkdir(exist_ok=True)
    temporary = folder / f"{STATE_FILE}.tmp"
    digest = _state_digest(json.loads(json.dumps(state)))  # of what is read back: keys that are numbers become text
    temporary.write_text(json.dumps({_DIGEST: digest, **state}, indent=1), encoding="utf-8")
    os.replace(temporary, folder / STATE_FILE)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Read what :func:`write_state` wrote. Raises DamagedCheckpointError: missing or damaged; CheckpointError: unreadable."""
    path = checkpoint / STATE_FOLDER / STATE_FILE
    text = _read(path)
    if text is None:
        raise DamagedCheckpointError(f"{path} is missing")
    try:
        state = json.loads(text)
        expected = state.pop(_DIGEST, None)
    except (ValueError, AttributeError, TypeError) as error:
        raise DamagedCheckpointError(f"{path} holds no state ({error}); resume from another checkpoint") from error
    if expected is not None and expected != _state_digest(state):
        raise DamagedCheckpointError(f"the content of {path} is not what was written (its SHA-256 is another)")
    return dict(state)


def _read(path: Path) -> bytes | None:
    """The bytes of a file; None where there is none. Raises CheckpointError: there is one, and it cannot be read."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); nothing was changed, so correct that first") from error


def _state_digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def _digests(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of each file; hashing releases the interpreter's lock, so files are read side by side."""
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(partial(_digest, folder), names), strict=True))


def _digest(folder: Path, name: str) -> str:
    with open(folder / name, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
