"""Reference log-probs on disk, so that a second or a resumed run needs no reference model.

A file is named after everything that its numbers depend on: the token rows, which of their tokens are trained, the files
of the reference checkpoint, and the compute type. A changed input is another name, so nothing stale can be read. Files lie
in ``$ARENO_CACHE_DIR/ref_logprobs``, else below ``$XDG_CACHE_HOME/areno`` or ``~/.cache/areno``, and may be deleted at any
time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from areno.cache_folder import cache_folder
from areno.config.paths import base_of, is_adapter
from areno.errors import UsageError
from areno.types import TrainSequence

logger = logging.getLogger(__name__)

# Their folder in the cache.
CACHE_KIND = "ref_logprobs"
# Part of every key: a change of what the numbers mean needs another one.
_FORMAT = "areno reference log-probs 1"
_NAME = "logprobs"
# Files of a checkpoint folder that decide what the model computes; the tokenizer's work is in the token rows already.
_MODEL_FILES = ("config.json", "adapter_config.json", "*.safetensors", "*.index.json", "pytorch_model*.bin", "*.py")


def checkpoint_digest(checkpoint: str) -> str:
    """SHA-256 over the model's files in a folder; for a hub id, over the commit that is in use."""
    folder = Path(checkpoint).expanduser()
    digest = hashlib.sha256()
    if is_adapter(checkpoint):
        digest.update(checkpoint_digest(base_of(checkpoint)).encode())
    if not folder.is_dir():
        digest.update(f"{checkpoint}@{_commit(checkpoint)}".encode())
        return digest.hexdigest()
    for path in sorted({path for pattern in _MODEL_FILES for path in folder.glob(pattern)}):
        with path.open("rb") as file:
            digest.update(f"{path.name}:{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def reference_key(rows: Sequence[TrainSequence], digest: str, dtype: str) -> str:
    """Name of the log-probs of rows and their trained tokens, from :func:`checkpoint_digest` and the compute type."""
    key = hashlib.sha256(f"{_FORMAT}\n{digest}\n{dtype}\n{len(rows)}\n".encode())
    for row in rows:
        key.update(len(row.tokens).to_bytes(8, "little"))
        key.update(np.asarray(row.tokens, dtype="<i8").tobytes())
        key.update(bytes(row.trainable()))
    return key.hexdigest()


def load_logprobs(key: str, tokens: int) -> Tensor | None:
    """Read what :func:`store_logprobs` wrote, fp32 [tokens]; None without a file, or with a damaged one (a warning)."""
    path = _file(key)
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            values, checksum = file.get_tensor(_NAME), (file.metadata() or {}).get("sha256")
        if values.shape == (tokens,) and checksum == _checksum(values):
            return values
        reason = "its content is not what was written"
    except (SafetensorError, OSError) as error:
        reason = str(error)
    logger.warning("%s is damaged (%s); the reference scores these rows again", path, reason)
    return None


def store_logprobs(key: str, values: Tensor) -> None:
    """Write fp32 log-probs [tokens] under a key, complete or not at all; a disk that refuses is warned about."""
    path, partial = _file(key), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(prefix=".partial-", dir=path.parent)
        os.close(descriptor)
        save_file({_NAME: values}, partial, metadata={"sha256": _checksum(values)})
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        logger.warning(
            "the reference log-probs could not be kept in %s (%s), so the next run computes them again; "
            "set ARENO_CACHE_DIR to a folder with room",
            *(path.parent, error),
        )
        if partial is not None:
            Path(partial).unlink(missing_ok=True)


def _file(key: str) -> Path:
    return cache_folder(CACHE_KIND) / f"{key}.safetensors"


def _checksum(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


def _commit(repo: str) -> str:
    from transformers.utils import cached_file

    try:
        found = cached_file(repo, "config.json")
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"the reference model {repo} was not found: {reason}; give --ref-ckpt (or --ckpt) a folder that exists "
            "or a repo id that can be reached"
        ) from error
    return Path(str(found)).parent.name
