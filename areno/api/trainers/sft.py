"""Supervised fine-tuning on prompt and response rows; held-out rows are judged by their loss per token."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

from areno.api.datasets import build_sft_rows
from areno.api.trainers.base import DataTrainer
from areno.errors import DataError
from areno.observability import lifecycle
from areno.training.report import StepOutcome
from areno.types import TrainSequence

logger = logging.getLogger("areno.api.trainers.sft.SFTTrainer")

_LARGEST_EXPONENT = 700.0


class SFTTrainer(DataTrainer):
    """Trains on the response tokens of each row; see :class:`~areno.training.loop.TrainingLoop`."""

    logger = logger
    best_metric = "loss"
    best_is_higher = False

    def prepare(self) -> None:
        """Tokenize the data sets once."""
        self.display.phase("tokenize")
        self._tokenized()
        if self.eval_rows is not None:
            self._held_out = self._tokenize(self.eval_rows, str(self.config.eval_dataset_path))

    def _tokenized(self) -> list[TrainSequence]:
        if not hasattr(self, "_rows"):
            self._rows = self._tokenize(self.dataset, str(self.config.dataset_path))
        return self._rows

    def _tokenize(self, rows: Sequence[dict[str, Any]], source: str) -> list[TrainSequence]:
        sequences, skipped = build_sft_rows(
            rows,
            self.instance.get_tokenizer(),
            max_prompt_tokens=self.config.max_prompt_tokens,
            max_new_tokens=self.config.max_new_tokens,
            eos_token_ids=self.instance.backend.eos_ids,
            context_limit=self.context_limit,
            source=source,
            disable_thinking=self.config.disable_thinking,
        )
        lifecycle.sft_dataset_filter(logger, skipped)
        return sequences

    def row_count(self) -> int:
        """Rows that survived tokenizing."""
        return len(self._tokenized())

    def batches(self, order: Sequence[int], start: int) -> Iterator[tuple[list[TrainSequence], int]]:
        """Slices of the epoch's order."""
        rows = self._tokenized()
        for begin in range(start, len(order), self.config.batch_size):
            chosen = order[begin : begin + self.config.batch_size]
            yield [rows[index] for index in chosen], begin + len(chosen)

    def run_step(self, batch: list[TrainSequence]) -> StepOutcome:
        """One supervised step."""
        epoch, step = self.state.epoch, self.state.step
        self.display.phase("train")
        lifecycle.train_start(logger, epoch, step, rows=len(batch))
        stats = self.train(batch)
        lifecycle.train_end(logger, epoch, step, rows=len(batch))
        stats["tokens_per_second"] = sum(len(row.tokens) for row in batch) / max(stats["step_train_time_s"], 1e-9)
        return StepOutcome(rows=batch, stats=stats, timings={"train": stats["step_train_time_s"]})

    def evaluate(self, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Loss per response token of the held-out rows, and the perplexity exp(loss); both independent of ``mini_bs``."""
        held_out = self._held_out if rows is self.eval_rows else self._tokenize(rows, "held-out rows")
        scores = self.instance.score_logprobs("actor", [row.tokens for row in held_out], micro_bs=self.config.mini_bs)
        targets = [
            logprob
            for row, logprobs in zip(held_out, scores, strict=True)
            for logprob, counts in zip(logprobs, row.trainable(), strict=True)
            if counts
        ]
        if not targets:
            raise DataError(f"{self.config.eval_dataset_path}: no held-out row has a token that another one precedes")
        loss = -math.fsum(targets) / len(targets)
        return {
            "loss": loss,
            "perplexity": math.inf if loss > _LARGEST_EXPONENT else math.exp(loss),
            "num_sequences": len(held_out),
            "target_tokens": len(targets),
            "skipped_long_or_empty": len(rows) - len(held_out),
        }
