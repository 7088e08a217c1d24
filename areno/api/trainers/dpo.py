"""Direct preference optimization against a frozen reference whose log-probs are computed once, and kept on disk.

The reference model is in memory only while it scores, and not at all where it is the policy's own beginning: then the
policy scores before its first step, or, with an adapter, without that. A run whose log-probs are on disk loads no reference.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from areno.api.ref_cache import (
    CACHE_KIND,
    ReferencedRows,
    checkpoint_digest,
    load_logprobs,
    reference_key,
    store_logprobs,
)
from areno.api.trainers.preference import PreferenceTrainer
from areno.cache_folder import cache_folder
from areno.engine.train.batch import PackedBatch
from areno.errors import EngineError
from areno.observability import lifecycle
from areno.training.report import StepOutcome
from areno.types import ModelRole, TrainSequence

logger = logging.getLogger("areno.api.trainers.dpo.DPOTrainer")

# Rows that are scored between two looks at the clock, in microbatches.
_SCORED_AT_ONCE = 8
_PROGRESS_S = 30.0


class DPOTrainer(PreferenceTrainer):
    """Raises the margin of chosen over rejected answers; see :class:`PreferenceTrainer`."""

    logger = logger
    prefix = "dpo_"
    held_out_stats = ("accuracy", "margin", "chosen_reward", "rejected_reward")

    def prepare(self) -> None:
        """Tokenize the pairs, and give every row the log-probs of the reference."""
        super().prepare()
        self.display.phase("reference")
        began = time.perf_counter()
        with self.stop.interruptible():
            data = [self.training, self.held_out] if self.held_out else [self.training]
            self.training, *held_out = self._with_reference(*data)
            self.held_out = held_out[0] if held_out else []
        self._reference_s = time.perf_counter() - began

    def report_dropped(self, dropped: int) -> None:
        """The documented log line."""
        lifecycle.pair_dataset_filter(logger, "dpo", dropped)

    def run_step(self, batch: list[TrainSequence]) -> StepOutcome:
        """One step; the first one carries the time that the reference took."""
        outcome = super().run_step(batch)
        outcome.stats["ref_logprob_forward_time_s"], self._reference_s = self._reference_s, 0.0
        return outcome

    def predict(self, rows: Sequence[TrainSequence], batch: PackedBatch) -> Tensor:
        """Log-probs of the policy [A]."""
        mask = batch.data["packed_response_mask"]
        return torch.zeros(mask.shape).masked_scatter(mask, self._scored("actor", rows))

    @property
    def _reference_path(self) -> str:
        return str(self.config.ref_ckpt or self.config.ckpt)

    def _with_reference(self, *data: Sequence[TrainSequence]) -> list[ReferencedRows]:
        """The rows with the reference's log-probs, from disk or from the model."""
        digest, dtype = checkpoint_digest(self._reference_path), self.instance.backend.config.compute_dtype
        if self.config.load_in_4bit and self._reference_path == self.config.ckpt:
            dtype += " nf4"
        referenced, role = [], None
        with ExitStack() as stack:
            for rows in data:
                key = reference_key(rows, digest, dtype)
                values = load_logprobs(key, sum(sum(row.trainable()) for row in rows))
                if values is None:
                    role = role or stack.enter_context(self._reference_role())
                    values = self._reference_logprobs(role, rows)
                    store_logprobs(key, values)
                else:
                    logger.info("reference log-probs of %d rows are read from %s", len(rows), cache_folder(CACHE_KIND))
                referenced.append(ReferencedRows(rows, values))
        return referenced

    @contextmanager
    def _reference_role(self) -> Iterator[str]:
        """A role that is the reference: the policy itself before its first step, else a model of its own."""
        path = self._reference_path
        if path == self.config.ckpt and self.state.step == 0 and not self.config.uses_lora:
            yield "actor"
            return
        lifecycle.role_init_start(logger, "ref", False, path)
        self.instance.ensure_roles({"ref": ModelRole("ref", path, trainable=False)})
        lifecycle.role_init_end(logger, "ref")
        try:
            yield "ref"
        finally:
            self.instance.drop_role("ref")

    def _reference_logprobs(self, role: str, rows: Sequence[TrainSequence]) -> Tensor:
        """Log-probs of the trained tokens of all rows [trained tokens]."""
        lifecycle.score_start(logger, "ref", "logprob_score", len(rows))
        parts, told = [], time.monotonic()
        size = _SCORED_AT_ONCE * self.config.score_micro_bs
        for begin in range(0, len(rows), size):
            parts.append(self._scored(role, rows[begin : begin + size]))
            if not parts[-1].isfinite().all():
                raise EngineError(
                    f"the reference {self._reference_path} gives log-probs that are not finite in the rows {begin} to "
                    f"{begin + len(rows[begin : begin + size])}; check that checkpoint, or try --dtype float32"
                )
            if time.monotonic() - told > _PROGRESS_S:
                told = time.monotonic()
                logger.info("role=ref stage=logprob_score rows=%d of %d", min(begin + size, len(rows)), len(rows))
        lifecycle.score_end(logger, "ref", "logprob_score", len(rows))
        return torch.cat(parts)

    def _scored(self, role: str, rows: Sequence[TrainSequence]) -> Tensor:
        """Log-probs of the trained tokens of some rows, end to end [trained tokens]."""
        logprobs = self.instance.score_logprobs(role, [row.tokens for row in rows], micro_bs=self.config.score_micro_bs)
        return torch.tensor(
            [
                value
                for row, values in zip(rows, logprobs, strict=True)
                for value, trained in zip(values, row.trainable(), strict=True)
                if trained
            ]
        )
