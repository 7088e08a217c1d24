"""Log-probs of a frozen reference, computed once before the first step and kept on disk.

The reference is in memory only while it scores, and not at all where it is the policy's own beginning: then the policy
scores before its first step, or, with an adapter, without that. A run whose log-probs are on disk loads no reference.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from logging import Logger

import torch
from torch import Tensor

from areno.cache_folder import cache_folder
from areno.engine.backend import ACTOR, Backend
from areno.errors import EngineError, UsageError
from areno.observability import lifecycle
from areno.training.objectives.base import Examples
from areno.training.objectives.ref_cache import (
    CACHE_KIND,
    checkpoint_digest,
    load_logprobs,
    reference_key,
    store_logprobs,
)
from areno.types import ModelRole, TrainSequence

# Rows that are scored between two looks at the clock, in microbatches.
_SCORED_AT_ONCE = 8
_PROGRESS_S = 30.0


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference and how it scores.

    Attributes:
        models: the policy among them, as the actor.
        path: checkpoint of the reference.
        actor_path: checkpoint that the policy began from.
        trained: the policy is no longer what it was in the beginning.
        micro_bs: rows of one forward pass.
        logger: gets the documented lines.
        random_seed: of random weights that the policy began from in place of its checkpoint's.
    """

    models: Backend
    path: str
    actor_path: str
    trained: bool
    micro_bs: int
    logger: Logger
    random_seed: int | None = None

    def score(self, examples: Examples, held_out: Examples | None) -> tuple[Examples, Examples | None]:
        """The examples, and held-out ones, with their log-probs, from disk or from the model."""
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
        """The compute type, and what else the numbers depend on besides rows and checkpoint."""
        config, text = self.models.config, self.models.config.compute_dtype
        if self.path == self.actor_path and config.adapter is not None and config.adapter.load_in_4bit:
            text += " nf4"
        return text if self.random_seed is None else f"{text} random weights of seed {self.random_seed}"

    @contextmanager
    def _role(self) -> Iterator[str]:
        """A role that is the reference: the policy itself before its first step, else a model of its own."""
        if self.path == self.actor_path and self.models.config.adapter is None:
            if not self.trained:
                yield ACTOR
                return
            if self.random_seed is not None:
                raise UsageError(f"the random weights that {self.path} began with are gone: begin a new run")
        lifecycle.role_init_start(self.logger, "ref", False, self.path)
        self.models.ensure_roles({"ref": ModelRole("ref", self.path, trainable=False)})
        lifecycle.role_init_end(self.logger, "ref")
        try:
            yield "ref"
        finally:
            self.models.drop_role("ref")

    def _logprobs(self, role: str, rows: Sequence[TrainSequence]) -> Tensor:
        """Log-probs of the trained tokens of all rows, end to end [trained tokens]."""
        lifecycle.score_start(self.logger, "ref", "logprob_score", len(rows))
        parts, shown = [], time.monotonic()
        size = _SCORED_AT_ONCE * self.micro_bs
        for begin in range(0, len(rows), size):
            chunk = rows[begin : begin + size]
            scores = self.models.score_logprobs(role, [row.tokens for row in chunk], 1.0, self.micro_bs)
            trained = [mask for row in chunk for mask in row.trainable()]
            parts.append(torch.tensor([value for values in scores for value in values])[torch.tensor(trained)])
            if not parts[-1].isfinite().all():
                raise EngineError(
                    f"the reference {self.path} gives log-probs that are not finite in the rows {begin} to "
                    f"{begin + len(chunk)}; check that checkpoint, or compute in float32"
                )
            if time.monotonic() - shown > _PROGRESS_S:
                shown = time.monotonic()
                self.logger.info("role=ref stage=logprob_score rows=%d of %d", begin + len(chunk), len(rows))
        lifecycle.score_end(self.logger, "ref", "logprob_score", len(rows))
        return torch.cat(parts)
