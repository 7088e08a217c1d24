"""Log-probs of a frozen reference, computed once before the first step and cached on disk.

The reference is in memory only during scoring. If its log-probs are cached, the reference is not loaded. If the reference is
the initial policy, no second model is needed: a policy with an adapter computes the log-probs with the adapter disabled, and
a policy without an adapter computes the log-probs before its first step. After a resume, a policy without an adapter has
already been trained, so the reference is loaded unless its log-probs are cached.

A cache file's name is a hash of all inputs: the token rows, the loss masks, the files of the reference checkpoint, the
compute dtype, the quantization, and the seed of the initial weights if they are random. If an input changes, the old file is
not read. The files are in ``ref_logprobs`` in the cache folder (by default ``~/.cache/areno``, see :mod:`areno.cache_folder`),
and may be deleted at any time.
"""

import functools
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from areno.cache_folder import cache_folder
from areno.config.paths import base_of
from areno.engine.backend import ACTOR, Backend
from areno.errors import EngineError, UsageError, first_line
from areno.observability import log_lines
from areno.training.objectives.base import Examples
from areno.types import ModelRole, TrainSequence

_log = logging.getLogger(__name__)

# Number of microbatches scored per call; after each call a progress line may be written.
_SCORED_AT_ONCE = 8
_PROGRESS_S = 30.0
# Cache subfolder.
CACHE_KIND = "ref_logprobs"
# Part of every key; change it when the meaning of the cached values changes.
_FORMAT = "areno reference log-probs 1"
_NAME = "logprobs"
# Checkpoint files that determine the model's output. The tokenizer is not needed: it affects only the token rows.
_MODEL_FILES = ("config.json", "adapter_config.json", "*.safetensors", "*.index.json", "pytorch_model*.bin", "*.py")


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference model, with the settings for scoring."""

    models: Backend  # also holds the policy (the actor)
    path: str  # checkpoint of the reference
    actor_path: str  # initial checkpoint of the policy
    trained: bool  # whether the policy has been trained, so that it is no longer the initial one
    micro_bs: int
    logger: logging.Logger
    random_seed: int | None = None  # seed of the policy's random initial weights; None if they come from its checkpoint

    def score(self, examples: Examples, held_out: Examples | None) -> tuple[Examples, Examples | None]:
        """Add reference log-probs, from the cache or newly computed, to the examples and the held-out examples."""
        digest = checkpoint_digest(self.path)
        with ExitStack() as stack:
            role = functools.cache(lambda: stack.enter_context(self._role()))
            scored = self._scored(examples, digest, role)
            return scored, None if held_out is None else self._scored(held_out, digest, role)

    def _scored(self, examples: Examples, digest: str, role: Callable[[], str]) -> Examples:
        rows = examples.rows
        key = reference_key(rows, digest, self._computes_in())
        values = load_logprobs(key, sum(sum(row.trainable()) for row in rows))
        if values is None:
            values = self._logprobs(role(), rows)
            store_logprobs(key, values)
        else:
            self.logger.info("reference log-probs of %d rows are read from %s", len(rows), cache_folder(CACHE_KIND))
        return Examples(rows, examples.size, values)

    def _computes_in(self) -> str:
        config, text = self.models.config, self.models.config.compute_dtype
        if self.path == self.actor_path and config.adapter is not None and config.adapter.load_in_4bit:
            text += " nf4"
        if self.random_seed is None or self.path != self.actor_path:
            return text
        return f"{text} random weights of seed {self.random_seed}"

    @contextmanager
    def _role(self) -> Iterator[str]:
        """Yield the name of the model that computes the reference log-probs.

        The policy computes them if it still has the weights of the reference: it started from the reference's checkpoint, was
        not trained yet, and has no adapter. In all other cases, the model is ``ref``, which exists only inside the ``with``
        block.
        """
        if self.path == self.actor_path and self.models.config.adapter is None and not self.trained:
            yield ACTOR
            return
        log_lines.role_init_start(self.logger, "ref", False, self.path)
        self.models.ensure_roles({"ref": ModelRole("ref", self.path, trainable=False)})
        log_lines.role_init_end(self.logger, "ref")
        try:
            yield "ref"
        finally:
            self.models.drop_role("ref")

    def _logprobs(self, role: str, rows: Sequence[TrainSequence]) -> Tensor:
        """Return the log-probs of the trained tokens of all rows, concatenated into one tensor."""
        log_lines.score_start(self.logger, "ref", "logprob_score", len(rows))
        parts, shown = [], time.monotonic()
        size = _SCORED_AT_ONCE * self.micro_bs
        for begin in range(0, len(rows), size):
            chunk = rows[begin : begin + size]
            scores = self.models.score_logprobs(role, [row.tokens for row in chunk], 1.0, self.micro_bs)
            trained = [mask for row in chunk for mask in row.trainable()]
            parts.append(torch.tensor([value for values in scores for value in values])[torch.tensor(trained)])
            if not parts[-1].isfinite().all():
                raise EngineError(
                    f"the reference {self.path} gives non-finite log-probs in rows {begin + 1} to "
                    f"{begin + len(chunk)}; check this checkpoint, or try --dtype float32 (actor.dtype=float32)"
                )
            if time.monotonic() - shown > _PROGRESS_S:
                shown = time.monotonic()
                self.logger.info("role=ref stage=logprob_score rows=%d of %d", begin + len(chunk), len(rows))
        log_lines.score_end(self.logger, "ref", "logprob_score", len(rows))
        return torch.cat(parts)


def checkpoint_digest(checkpoint: str) -> str:
    """Return the SHA-256 hash of a checkpoint's model files. For an adapter, the base model is included.

    For a hub id, the hash covers the id and the cached commit.
    """
    folder, base = Path(checkpoint).expanduser(), base_of(checkpoint)
    digest = hashlib.sha256()
    if base != checkpoint:
        digest.update(checkpoint_digest(base).encode())
    if not folder.exists():
        digest.update(f"{checkpoint}@{_commit(checkpoint)}".encode())
        return digest.hexdigest()
    for path in sorted({path for pattern in _MODEL_FILES for path in folder.glob(pattern)}):
        with path.open("rb") as file:
            digest.update(f"{path.name}:{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def reference_key(rows: Sequence[TrainSequence], digest: str, dtype: str) -> str:
    """Return the cache key for the log-probs of rows.

    ``digest`` is from :func:`checkpoint_digest`. ``dtype`` states the compute dtype and, if used, the quantization and the
    seed of random initial weights.
    """
    key = hashlib.sha256(f"{_FORMAT}\n{digest}\n{dtype}\n{len(rows)}\n".encode())
    for row in rows:
        key.update(len(row.tokens).to_bytes(8, "little"))
        key.update(np.asarray(row.tokens, dtype="<i8").tobytes())
        key.update(bytes(row.trainable()))
    return key.hexdigest()


def load_logprobs(key: str, tokens: int) -> Tensor | None:
    """Return cached log-probs, fp32 [tokens]; None if there is no file, or if the file is damaged (with a warning)."""
    path = _file(key)
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            values, checksum = file.get_tensor(_NAME), (file.metadata() or {}).get("sha256")
        if values.shape == (tokens,) and checksum == _checksum(values):
            return values
        reason = "its checksum does not match"
    except (SafetensorError, OSError) as error:
        reason = str(error)
    _log.warning("the cache file %s is damaged (%s), so the reference log-probs are recomputed", path, reason)
    return None


def store_logprobs(key: str, values: Tensor) -> None:
    """Write fp32 log-probs [tokens] under a key, atomically. A failure only causes a warning."""
    path, partial = _file(key), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(prefix=".partial-", dir=path.parent)
        os.close(descriptor)
        save_file({_NAME: values}, partial, metadata={"sha256": _checksum(values)})
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        _log.warning(
            "the reference log-probs could not be cached in %s (%s), so the next run recomputes them; set ARENO_CACHE_DIR to "
            "a writable folder with enough space",
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
        config = cached_file(repo, "config.json")
    except OSError as error:
        raise UsageError(
            f"the reference model {repo} was not found: {first_line(error)}; set --ref-ckpt (or --ckpt) to an existing folder "
            "or a reachable repo id"
        ) from error
    return Path(str(config)).parent.name
