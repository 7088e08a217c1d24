"""The trainer's state in a checkpoint, and the manifest with the SHA-256 of each file.

    trainer_state/state.json      the state as JSON, including its own SHA-256
    trainer_state/manifest.json   {"files": {"model.safetensors": {"bytes": ..., "sha256": ...}, ...}}

The manifest does not list ``state.json``, because an evaluation may later replace this file. A copy of a checkpoint consists
of hard links if possible. The manifest of the copy has the same entries, so no file is hashed twice.
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
from areno.storage.files import replacing

STATE_FOLDER = "trainer_state"
STATE_FILE = "state.json"
_MANIFEST = "manifest.json"
_UNLISTED = {f"{STATE_FOLDER}/{name}" for name in (STATE_FILE, _MANIFEST)}
_THREADS = 8
_DIGEST = "sha256"
FORMAT = 1
"""Format number of the trainer's state, incremented by changes that older versions of areno cannot read."""


def write_manifest(folder: Path) -> None:
    """Write the manifest of a checkpoint whose other files are complete."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = sorted(name for name in paths if name not in _UNLISTED)
    (folder / STATE_FOLDER).mkdir(exist_ok=True)
    _replace_manifest(folder, _entries(folder, names))


def list_again(folder: Path, name: str) -> None:
    """Update the entry of the file ``name`` in the manifest of a checkpoint, after this file was replaced or deleted.

    Does nothing if the checkpoint has no manifest.
    """
    path = folder / STATE_FOLDER / _MANIFEST
    if not path.exists():
        return
    files = json.loads(path.read_text(encoding="utf-8"))["files"]
    files.pop(name, None)
    _replace_manifest(folder, files | _entries(folder, [name] if (folder / name).exists() else []))


def _entries(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    return {
        name: {"bytes": (folder / name).stat().st_size, _DIGEST: digest}
        for name, digest in _digests(folder, names).items()
    }


def _replace_manifest(folder: Path, files: dict[str, Any]) -> None:
    with replacing(folder / STATE_FOLDER / _MANIFEST) as temporary:
        temporary.write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")


def check_files(folder: Path, *, required: bool = False) -> None:
    """Verify a checkpoint against its manifest. A missing manifest is an error only if ``required`` is set.

    Raises:
        DamagedCheckpointError: a file is missing or differs from the manifest, or the manifest itself is malformed or missing.
        CheckpointError: a file cannot be read.
    """
    path = folder / STATE_FOLDER / _MANIFEST
    text = _read(path)
    if text is None:
        if required:
            raise DamagedCheckpointError(f"{path} is missing")
        return
    try:
        listed = {str(name): (int(one["bytes"]), str(one[_DIGEST])) for name, one in json.loads(text)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path} is not a valid manifest ({error})") from error
    try:
        for name, (size, _) in listed.items():
            if not (folder / name).is_file():
                raise DamagedCheckpointError(f"{folder / name} is missing")
            if (actual := os.path.getsize(folder / name)) != size:
                raise DamagedCheckpointError(f"{folder / name} has {actual} bytes, but the manifest lists {size} bytes")
        digests = _digests(folder, list(listed))
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or folder} cannot be read ({error}); the checkpoint was not modified; fix the cause and try again"
        ) from error
    for name, (_, digest) in listed.items():
        if digests[name] != digest:
            raise DamagedCheckpointError(
                f"{folder / name} does not match its SHA-256 in the manifest {path}; if you changed the file on purpose, "
                "delete the manifest"
            )


def write_state(checkpoint: Path, state: dict[str, Any]) -> None:
    """Write or atomically replace the trainer's state. A checkpoint without this state is incomplete."""
    folder = checkpoint / STATE_FOLDER
    folder.mkdir(exist_ok=True)
    state = {"format": FORMAT, **state}
    digest = _state_digest(json.loads(json.dumps(state)))  # as it will be read: JSON converts numeric keys to text
    with replacing(folder / STATE_FILE) as temporary:
        temporary.write_text(json.dumps({_DIGEST: digest, **state}, indent=1), encoding="utf-8")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the state that :func:`write_state` wrote.

    Raises:
        DamagedCheckpointError: the state is missing or damaged.
        CheckpointError: the state cannot be read, or has a different format.
    """
    path = checkpoint / STATE_FOLDER / STATE_FILE
    text = _read(path)
    if text is None:
        raise DamagedCheckpointError(f"{path} is missing")
    try:
        state = json.loads(text)
        expected = state.pop(_DIGEST, None)
    except (ValueError, AttributeError, TypeError) as error:
        raise DamagedCheckpointError(
            f"{path} is not a valid state ({error}); resume from another checkpoint"
        ) from error
    if expected is not None and expected != _state_digest(state):
        raise DamagedCheckpointError(
            f"{path} is damaged: its content does not match the SHA-256 stored in the same file"
        )
    if (written := state.pop("format", FORMAT)) != FORMAT:
        raise CheckpointError(
            f"{checkpoint} has format {written!r}, but this version of areno reads format {FORMAT}; resume the run with the "
            "version of areno that wrote the checkpoint, or start a new run with the checkpoint as --ckpt"
        )
    return dict(state)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); the checkpoint was not modified; fix the cause and try again"
        ) from error


def _state_digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def _digests(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 of each file, computed in several threads, because hashing releases the GIL."""
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(partial(_digest, folder), names), strict=True))


def _digest(folder: Path, name: str) -> str:
    with open(folder / name, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
