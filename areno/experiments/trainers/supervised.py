"""Experiments that generate nothing: SFT, reward models, DPO and IPO. Each step takes rows of the data set."""

from __future__ import annotations

import functools
import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from areno.api.datasets import build_sft_rows
from areno.api.preferences import build_preference_rows
from areno.api.row_checks import Needs
from areno.config.experiment.experiments import DPOConfig, RWConfig
from areno.config.experiment.idle_checks import LOADER
from areno.config.experiment.run_sections import TrainDatasetConfig
from areno.experiments.trainers.engines import micro_batching
from areno.experiments.trainers.experiment import ExperimentTrainer, in_scope
from areno.experiments.trainers.rows import RowSource
from areno.experiments.trainers.update import REF
from areno.loss_fns.named import language_model_loss_fn, pair_score_loss_fn, preference_loss_fn
from areno.loss_fns.shaping import sizes
from areno.training.frequency import StepInfo
from areno.training.report import StepOutcome
from areno.types import ModelRole, TrainSequence, tightest

_log = logging.getLogger(__name__)

_ANY_LENGTH = 2**31


class SupervisedTrainer(ExperimentTrainer):
    """What the three share: rows are tokenized once, a step is one optimizer step over ``batch_size`` of them."""

    needs: Needs | None = "response"
    together: ClassVar[int] = 1
    """Sequences that a pass must not part."""

    def train(self, total_epochs: int | None = None) -> None:
        """Run the experiment; ``total_epochs`` is in place of ``total_train_epochs``."""
        self.plan_steps(total_epochs)
        self.batching = micro_batching(
            self.config.actor.mb_spec, together=self.together, tree=self.config.actor.enable_tree_training
        )
        self.ensure_roles()
        self.fit()

    def make_rows(self, train: Sequence[Any], valid: Sequence[Any] | None) -> tuple[RowSource, Sequence[Any] | None]:
        """Training rows, or pairs of them; those that are longer than ``max_length`` are left out."""
        config, section = self.config, self.config.train_dataset
        found = self._encoded(train, section, "train_dataset")
        held_out = None
        if valid is not None:
            held_out = self._encoded(valid, config.valid_dataset or section, "valid_dataset")
        names = {"shuffle": section.shuffle, "drop_last": section.drop_last}
        return RowSource(found, batch_size=section.batch_size, seed=config.seed, **names), held_out

    def _encoded(self, rows: Sequence[Any], section: TrainDatasetConfig, name: str) -> Sequence[Any]:
        longest = tightest(section.max_length, self.engine.context_length) or _ANY_LENGTH
        bounds = {"max_length": section.max_length, "the model's context": self.engine.context_length}
        limits = " and ".join(f"{what} {bound}" for what, bound in bounds.items() if bound is not None)
        names = {"source": f"{name} {section.path}", "loader": f"{name}.dataset_kwargs.{LOADER}"}
        found, left_out = self.encode(rows, longest, names | {"limits": limits or "no limit of their length"})
        if left_out:
            _log.info("%s: %d of %d rows are too long or have no answer, and are left out", name, left_out, len(rows))
        return found

    @abstractmethod
    def encode(self, rows: Sequence[Any], longest: int, names: dict[str, Any]) -> tuple[list[Any], int]:
        """Rows as tokens, and how many were left out; ``names`` are those of the data and its settings in errors."""

    @abstractmethod
    def loss(self) -> Any:
        """The loss of a step."""

    def sequences(self, batch: Sequence[Any]) -> list[TrainSequence]:
        """The sequences of some rows."""
        return list(batch)

    def score_rows(self, rows: list[TrainSequence]) -> None:
        """Give rows what the loss needs besides their tokens."""

    def run_step(self, at: StepInfo) -> StepOutcome:
        """One optimizer step over the next rows."""
        self.display.phase("train")
        rows = self.sequences(self.rows.batch())
        self.score_rows(rows)
        rate = self.schedule.at(at.global_step + 1)
        with self.timed("train_step"):
            told = self.optimize(rows, self.loss(), self.batching, rate)
        numbers = in_scope(self.section, {**told, **_sizes(rows), "lr": rate})
        return StepOutcome(rows, numbers, sequences=numbers.get(f"{self.section}/n_seqs", self.rows.batch_size))

    def measure(self) -> dict[str, float]:
        """The loss and its statistics on the held-out rows, without training."""
        assert self.valid_rows is not None
        rows = self.sequences(self.valid_rows)
        self.score_rows(rows)
        told = self.engine.measure(rows, self.loss(), self.batching)
        return in_scope(f"{self.section}/eval", {**told, **_sizes(rows)})


def _sizes(rows: Sequence[TrainSequence]) -> dict[str, float]:
    return {**sizes(rows), "prompt_tokens": float(sum(sum(row.prompt_mask) for row in rows))}


class SFTTrainer(SupervisedTrainer):
    """Supervised fine-tuning: on a response to a prompt, an answer to a question, or the last message of a conversation."""

    section: ClassVar[str] = "sft"
    best_metric = "sft/eval/loss"

    def encode(self, rows: Sequence[Any], longest: int, names: dict[str, Any]) -> tuple[list[Any], int]:
        """Prompts with their responses."""
        return build_sft_rows(
            rows,
            self.engine.tokenizer,
            max_prompt_tokens=_ANY_LENGTH,
            max_new_tokens=_ANY_LENGTH,
            eos_token_ids=self.engine.eos_ids,
            context_limit=longest,
            **names,
        )

    def loss(self) -> Any:
        """Mean negative log-prob of the response tokens."""
        return language_model_loss_fn


class PairTrainer(SupervisedTrainer):
    """Pairs of a chosen and a rejected answer; ``batch_size`` counts pairs."""

    needs: Needs | None = "pair"
    together: ClassVar[int] = 2

    def encode(self, rows: Sequence[Any], longest: int, names: dict[str, Any]) -> tuple[list[Any], int]:
        """Pairs of sequences."""
        return build_preference_rows(
            rows,
            self.engine.tokenizer,
            max_prompt_tokens=longest,
            max_new_tokens=0,
            eos_token_ids=self.engine.eos_ids,
            **names,
        )

    def sequences(self, batch: Sequence[Any]) -> list[TrainSequence]:
        """Chosen and rejected in turn."""
        return [side for pair in batch for side in pair]


class RWTrainer(PairTrainer):
    """A reward model (Bradley and Terry 1952)."""

    config: RWConfig
    section: ClassVar[str] = "rw"
    best_metric = "rw/eval/correct_ratio/avg"
    best_is_higher = True
    actor_trains: ClassVar[str] = "reward"

    def loss(self) -> Any:
        """-log sigmoid of the difference of the scores."""
        return pair_score_loss_fn


class DPOTrainer(PairTrainer):
    """DPO and IPO against a frozen reference, which scores each batch."""

    config: DPOConfig
    section: ClassVar[str] = "dpo"
    best_metric = "dpo/eval/reward_accuracy/avg"
    best_is_higher = True

    def ensure_roles(self) -> None:
        """The reference."""
        self.engine.ensure_roles({REF: ModelRole(REF, self.config.ref.path, trainable=False)})

    def score_rows(self, rows: list[TrainSequence]) -> None:
        """Log-probs of the reference."""
        self.score(rows, REF, "ref_logprobs", self.config.ref.mb_spec)

    def loss(self) -> Any:
        """DPO's or IPO's."""
        actor = self.config.actor
        return functools.partial(preference_loss_fn, beta=actor.beta, loss_type=actor.loss_type)
