"""Trainers of ``areno train`` for SFT, DPO and reward models. Rows are tokenized once, before the first step."""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from areno.api.trainers.base import DatasetTrainer
from areno.config.algorithms import get_algorithm
from areno.errors import DataError, EngineError
from areno.loss_fns.loss_interface import LossFn
from areno.observability import log_lines
from areno.training.objectives.base import Examples, Objective, RowBounds, sequences
from areno.training.objectives.pairs import DPO, PAIRS, REWARD_MODEL
from areno.training.objectives.reference import Reference
from areno.training.objectives.sft import SFT
from areno.training.reporter import StepOutcome
from areno.types import TrainSequence

_LARGEST_EXPONENT = 700.0


class SupervisedTrainer(DatasetTrainer):
    """Trains on examples, which are rows or pairs. A pair counts as two rows in ``--mini-bs``."""

    objective: ClassVar[Objective]
    held_out: Examples | None

    def prepare(self) -> None:
        """Tokenize the training and the held-out rows."""
        self.display.phase("tokenize")
        self.examples, self.held_out = self._encoded(self.dataset, self.config.dataset_path), None
        if self.eval_rows is not None:
            self.held_out = self._encoded(self.eval_rows, self.config.eval_dataset_path)

    def _encoded(self, rows: Sequence[dict[str, Any]], source: str | None) -> Examples:
        examples, dropped = self.objective.encode(
            rows,
            self.instance.get_tokenizer(),
            RowBounds(
                max_prompt_tokens=self.config.max_prompt_tokens,
                max_new_tokens=self.config.max_new_tokens,
                eos_token_ids=self.instance.backend.eos_ids,
                context_limit=self.context_limit,
                source=str(source),
                disable_thinking=self.config.disable_thinking,
            ),
        )
        if self.objective.unit == "rows":
            log_lines.sft_dataset_filter(self.logger, dropped)
        else:
            log_lines.pair_dataset_filter(self.logger, get_algorithm(self.config.algo).name, dropped)
        return examples

    def row_count(self) -> int:
        """Return the number of examples per epoch."""
        return len(self.examples)

    def batches(self, order: Sequence[int], start: int) -> Iterator[tuple[list[TrainSequence], int]]:
        """Yield ``(sequences, position)`` for each batch. The examples after the batch are ``order[position:]``."""
        for first in range(start, len(order), self.config.batch_size):
            indices = order[first : first + self.config.batch_size]
            yield sequences(self.examples[index] for index in indices), first + len(indices)

    def run_step(self, batch: list[TrainSequence]) -> StepOutcome:
        """Run one step on a batch."""
        epoch, step = self.state.epoch, self.state.step
        counted: Any = {self.objective.unit: len(batch) // self.objective.sequences}
        self.display.phase("train")
        log_lines.train_start(self.logger, epoch, step, **counted)
        stats = self.train(batch)
        log_lines.train_end(self.logger, epoch, step, **counted)
        stats["tokens_per_second"] = sum(len(row.tokens) for row in batch) / max(stats["step_train_time_s"], 1e-9)
        return StepOutcome(rows=batch, stats=stats, timings={"train": stats["step_train_time_s"]})

    def evaluate(self, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Return loss and statistics of the held-out examples that :meth:`prepare` has tokenized."""
        if rows is not self.eval_rows:
            raise EngineError(
                "evaluate() accepts only the held-out rows of the run, which prepare() has tokenized; pass eval_rows"
            )
        return self._measured(self.loss_fn, self.config.score_micro_bs)

    def _measured(self, loss_fn: LossFn, rows_at_once: int) -> dict[str, float]:
        assert self.held_out is not None
        stats = self.instance.backend.measure(sequences(self.held_out), loss_fn, rows_at_once)
        names = {"loss": "loss", **self.objective.held_out}
        return {name: stats[source] for name, source in names.items() if source in stats}


class SFTDatasetTrainer(SupervisedTrainer):
    """Trains on the response tokens of each row."""

    logger = logging.getLogger("areno.api.trainers.supervised.SFTDatasetTrainer")
    objective = SFT

    def evaluate(self, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Return the SFT loss per response token of the held-out rows, and the perplexity exp(loss)."""
        assert self.held_out is not None
        metrics = self._measured(SFT.loss_fn, self.config.mini_bs)
        if not metrics["target_tokens"]:
            raise DataError(f"{self.config.eval_dataset_path}: no held-out row has a token to predict; add responses")
        metrics["perplexity"] = math.inf if metrics["loss"] > _LARGEST_EXPONENT else math.exp(metrics["loss"])
        counts = {"num_sequences": len(self.held_out), "skipped_long_or_empty": len(rows) - len(self.held_out)}
        return {**metrics, **counts}


class DPODatasetTrainer(SupervisedTrainer):
    """Trains on preference pairs with a reference model, whose log-probs are computed once."""

    logger = logging.getLogger("areno.api.trainers.supervised.DPODatasetTrainer")
    objective = DPO
    best_metric = "accuracy"
    best_is_higher = True

    def prepare(self) -> None:
        """Tokenize the pairs, and add the reference's log-probs to every row."""
        super().prepare()
        self.display.phase("reference")
        start, config = time.perf_counter(), self.config
        paths = str(config.ref_ckpt or config.ckpt), str(config.ckpt)
        trained, size = self.state.step > 0, config.score_micro_bs
        reference = Reference(self.instance.backend, *paths, trained, size, self.logger)
        with self.stop.interruptible():
            self.examples, self.held_out = reference.score(self.examples, self.held_out)
        self._reference_s = time.perf_counter() - start

    def run_step(self, batch: list[TrainSequence]) -> StepOutcome:
        """Run one step. The statistics of the first step include the time in which :meth:`prepare` ran the reference model."""
        outcome = super().run_step(batch)
        outcome.stats["ref_logprob_forward_time_s"], self._reference_s = self._reference_s, 0.0
        return outcome


class RewardModelTrainer(SupervisedTrainer):
    """Trains a classifier with one output, so that it scores a pair's chosen answer above the rejected answer."""

    logger = logging.getLogger("areno.api.trainers.supervised.RewardModelTrainer")
    objective = REWARD_MODEL
    best_metric = "accuracy"
    best_is_higher = True


class PairTrainer(SupervisedTrainer):
    """Trains on preference pairs without a reference model, with the loss of the selected algorithm."""

    logger = logging.getLogger("areno.api.trainers.supervised.PairTrainer")
    objective = PAIRS
