"""Supervised fine-tuning on prompt and response rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from areno.api.datasets import build_sft_rows
from areno.api.trainers.loop import StepOutcome, TrainingLoop
from areno.observability import lifecycle
from areno.types import TrainSequence

logger = logging.getLogger("areno.api.trainers.sft.SFTTrainer")


class SFTTrainer(TrainingLoop):
    """Trains on the response tokens of each row; see :class:`~areno.api.trainers.loop.TrainingLoop`."""

    logger = logger

    def prepare(self) -> None:
        """Tokenize the data set once."""
        self.display.phase("tokenize")
        self._tokenized()

    def _tokenized(self) -> list[TrainSequence]:
        if not hasattr(self, "_rows"):
            self._rows, skipped = build_sft_rows(
                self.dataset,
                self.instance.get_tokenizer(),
                max_prompt_tokens=self.config.max_prompt_tokens,
                max_new_tokens=self.config.max_new_tokens,
                eos_token_ids=self.instance.backend.eos_token_ids(),
                source=str(self.config.dataset_path),
                disable_thinking=self.config.disable_thinking,
            )
            lifecycle.sft_dataset_filter(logger, skipped)
        return self._rows

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
        targets = sum(sum(row.trainable()) for row in batch)
        stats["sft_target_tokens"] = float(targets)
        stats["tokens_per_second"] = sum(len(row.tokens) for row in batch) / max(stats["step_train_time_s"], 1e-9)
        return StepOutcome(rows=batch, stats=stats, timings={"train": stats["step_train_time_s"]})
