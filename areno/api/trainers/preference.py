"""What training on preferences shares: pairs of rows, chosen first, that are never parted, and their held-out measures."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from areno.api.preferences import build_preference_rows
from areno.api.trainers.base import DataTrainer
from areno.engine.train.batch import PackedBatch, pack_rows
from areno.errors import EngineError
from areno.loss_fns.stats import Mean
from areno.observability import lifecycle
from areno.training.report import StepOutcome
from areno.types import TrainSequence

# Held-out pairs that are measured at once.
_CHUNK_PAIRS = 32


class PreferenceTrainer(DataTrainer):
    """Steps over pairs: ``--batch-size`` counts pairs, ``--mini-bs`` rows.

    Rows lie end to end: pair i is the rows 2i (chosen) and 2i + 1 (rejected). A trainer says how held-out rows are
    predicted for its loss, and which of the loss's statistics describe them.
    """

    best_metric = "accuracy"
    best_is_higher = True
    prefix: str
    """What the names of the loss's statistics begin with."""
    held_out_stats: tuple[str, ...]
    """Statistics of the loss that an evaluation reports, without the prefix."""

    @abstractmethod
    def predict(self, rows: Sequence[TrainSequence], batch: PackedBatch) -> Tensor:
        """What the loss takes besides the pack, from the model as it is, without gradient."""

    @abstractmethod
    def report_dropped(self, dropped: int) -> None:
        """Log how many training pairs cannot be used."""

    def prepare(self) -> None:
        """Tokenize the training and the held-out pairs once."""
        self.display.phase("tokenize")
        self.training, dropped = self._tokenized(self.dataset, self.config.dataset_path)
        self.report_dropped(dropped)
        self.held_out: Sequence[TrainSequence] = []
        if self.eval_rows is not None:
            self.held_out, dropped = self._tokenized(self.eval_rows, self.config.eval_dataset_path)
            self.logger.info("held-out pairs: %d are used, %d are dropped", len(self.held_out) // 2, dropped)

    def _tokenized(self, rows: Sequence[Mapping[str, Any]], source: str | None) -> tuple[Sequence[TrainSequence], int]:
        pairs, dropped = build_preference_rows(
            rows,
            self.instance.get_tokenizer(),
            max_prompt_tokens=self.config.max_prompt_tokens,
            max_new_tokens=self.config.max_new_tokens,
            eos_token_ids=self.instance.backend.eos_ids,
            context_limit=self.context_limit,
            source=str(source),
            disable_thinking=self.config.disable_thinking,
        )
        return [row for pair in pairs for row in pair], dropped

    def row_count(self) -> int:
        """Pairs of an epoch."""
        return len(self.training) // 2

    def batches(self, order: Sequence[int], start: int) -> Iterator[tuple[list[TrainSequence], int]]:
        """Rows of slices of the epoch's order."""
        for begin in range(start, len(order), self.config.batch_size):
            taken = order[begin : begin + self.config.batch_size]
            yield [row for pair in taken for row in self.training[2 * pair : 2 * pair + 2]], begin + len(taken)

    def run_step(self, batch: list[TrainSequence]) -> StepOutcome:
        """One step on some pairs."""
        epoch, step = self.state.epoch, self.state.step
        self.display.phase("train")
        lifecycle.train_start(self.logger, epoch, step, pairs=len(batch) // 2)
        stats = self.train(batch)
        lifecycle.train_end(self.logger, epoch, step, pairs=len(batch) // 2)
        stats["tokens_per_second"] = sum(len(row.tokens) for row in batch) / max(stats["step_train_time_s"], 1e-9)
        return StepOutcome(rows=batch, stats=stats, timings={"train": stats["step_train_time_s"]})

    def evaluate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Mean loss, accuracy and margin over held-out pairs.

        Args:
            rows: the run's own held-out rows, which :meth:`prepare` has tokenized.

        Raises:
            EngineError: they are others.
        """
        if rows is not self.eval_rows:
            raise EngineError("evaluate() takes the held-out rows of the run, eval_rows: they were prepared beforehand")
        totals: dict[str, float] = {}
        for begin in range(0, len(self.held_out), 2 * _CHUNK_PAIRS):
            chunk = self.held_out[begin : begin + 2 * _CHUNK_PAIRS]
            batch = pack_rows(chunk)
            loss, stats = self.loss_fn(batch.data, self.predict(chunk, batch))
            values = {"loss": loss} | {name: stats[f"{self.prefix}{name}"] for name in self.held_out_stats}
            for name, value in values.items():
                totals[name] = totals.get(name, 0.0) + _number(value) * len(chunk)
        return {name: total / len(self.held_out) for name, total in totals.items()}


def _number(value: Any) -> float:
    return float(value.total) / float(value.count) if isinstance(value, Mean) else float(value)
