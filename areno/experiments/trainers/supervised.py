"""Trains without generation: SFT, reward models, DPO, IPO and SLiC."""

import functools
import logging
from collections.abc import Sequence
from typing import Any, ClassVar, cast

from areno.config.experiment.engine_sections import DPOEngineConfig
from areno.config.experiment.experiments import DPOConfig
from areno.config.experiment.named_algorithm import named_algorithm
from areno.config.experiment.run_sections import LOADER, TrainDatasetConfig
from areno.experiments.trainers.engines import micro_batching, rows_at_once
from areno.experiments.trainers.experiment import ExperimentTrainer, in_scope
from areno.experiments.trainers.row_source import RowSource
from areno.loss_fns.loss_interface import LossFn
from areno.loss_fns.shaping import sizes
from areno.loss_fns.units import with_names
from areno.training.frequency import StepInfo
from areno.training.objectives.base import Examples, Objective, RowBounds, sequences
from areno.training.objectives.pairs import DPO, REWARD_MODEL
from areno.training.objectives.reference import Reference
from areno.training.objectives.sft import SFT
from areno.training.reporter import StepOutcome
from areno.types import TrainSequence, tightest

_log = logging.getLogger(__name__)

_ANY_LENGTH = 2**31


class SupervisedExperimentTrainer(ExperimentTrainer):
    """Tokenizes all rows once. Each training step is one optimizer step on ``batch_size`` examples."""

    objective: ClassVar[Objective]

    def train(self, total_epochs: int | None = None) -> None:
        """Run the experiment; ``total_epochs`` replaces ``total_train_epochs``."""
        self.plan_steps(total_epochs)
        actor = self.config.actor
        self.batching = micro_batching(
            actor.mb_spec, together=self.objective.sequences, tree=actor.enable_tree_training
        )
        self.loss_fn = self.loss()
        self.fit()

    def make_rows(self, train: Sequence[Any], valid: Sequence[Any] | None) -> tuple[RowSource, Examples | None]:
        """Return the training examples and the held-out examples.

        Examples longer than ``max_length`` or longer than the model's context are dropped.
        """
        config, section = self.config, self.config.train_dataset
        examples = self._encoded(train, section, "train_dataset")
        held_out = None
        if valid is not None:
            held_out = self._encoded(valid, config.valid_dataset or section, "valid_dataset")
        return RowSource(examples, section, config.seed), held_out

    def _encoded(self, rows: Sequence[Any], section: TrainDatasetConfig, name: str) -> Examples:
        bounds = {"max_length": section.max_length, "the model's context": self.engine.context_length}
        limits = " and ".join(f"{what} {bound}" for what, bound in bounds.items() if bound is not None)
        examples, dropped = self.objective.encode(
            rows,
            self.engine.tokenizer,
            RowBounds(
                max_prompt_tokens=_ANY_LENGTH,
                max_new_tokens=_ANY_LENGTH,
                eos_token_ids=self.engine.eos_ids,
                context_limit=tightest(*bounds.values()),
                source=f"{name} {section.path}",
                loader=f"{name}.dataset_kwargs.{LOADER}",
                limits=limits or "no length limit",
            ),
        )
        if dropped:
            _log.info(
                "%s: dropped %d of %d rows, because they are too long or have no answer", name, dropped, len(rows)
            )
        return examples

    def loss(self) -> LossFn:
        """Return the loss function of training and evaluation."""
        return self.objective.experiment_loss()

    def run_step(self, at: StepInfo) -> StepOutcome:
        """Take one optimizer step on the next rows."""
        self.display.phase("train")
        rows = sequences(self.rows.batch())
        rate = self.schedule.at(at.global_step + 1)
        with self.timed("train_step"):
            stats = self.optimize(rows, self.loss_fn, self.batching, rate)
        numbers = in_scope(self.section, {**stats, **_sizes(rows), "lr": rate})
        return StepOutcome(rows, numbers, sequences=numbers.get(f"{self.section}/n_seqs", self.rows.batch_size))

    def measure(self) -> dict[str, float]:
        """Return the loss and the other statistics on the held-out rows."""
        assert self.eval_rows is not None
        rows = sequences(self.eval_rows)
        stats = self.engine.measure(rows, self.loss_fn, self.batching)
        return in_scope(f"{self.section}/eval", {**stats, **_sizes(rows)})


def _sizes(rows: Sequence[TrainSequence]) -> dict[str, float]:
    return {**sizes(rows), "prompt_tokens": float(sum(sum(row.prompt_mask) for row in rows))}


class SFTTrainer(SupervisedExperimentTrainer):
    """Fine-tunes on the response to a prompt, the answer to a question, or the last message of a conversation."""

    objective = SFT
    needs = objective.needs
    section: ClassVar[str] = "sft"
    best_metric = "sft/eval/loss"


class RWTrainer(SupervisedExperimentTrainer):
    """Trains a reward model (Bradley and Terry 1952). ``batch_size`` counts pairs."""

    objective = REWARD_MODEL
    needs = objective.needs
    section: ClassVar[str] = "rw"
    best_metric = "rw/eval/correct_ratio/avg"
    best_is_higher = True
    actor_trains: ClassVar[str] = "reward"


class DPOTrainer(SupervisedExperimentTrainer):
    """Trains with DPO, IPO or SLiC. A frozen reference model scores all rows once. ``batch_size`` counts pairs."""

    config: DPOConfig
    objective = DPO
    needs = objective.needs
    section: ClassVar[str] = "dpo"
    best_metric = "dpo/eval/reward_accuracy/avg"
    best_is_higher = True

    def prepare(self) -> None:
        """Set the reference log-probs of all rows, unless ``actor.algorithm`` is set.

        ``actor.algorithm`` can select only algorithms without a reference model.
        """
        if self.config.actor.algorithm:
            return
        self.display.phase("reference")
        examples: Any = self.rows.rows
        held_out: Any = self.eval_rows
        actor, ref = self.config.actor, self.config.ref
        size = rows_at_once(ref.mb_spec, max(len(row.tokens) for row in examples.rows))
        reference = Reference(
            *(self.engine, ref.path, actor.path, self.state.step > 0, size, _log),
            random_seed=self.config.seed if actor.init_from_scratch else None,
        )
        with self.timed("ref_logp"), self.stop.interruptible():
            self.rows.rows, self.eval_rows = reference.score(examples, held_out)

    def loss(self) -> LossFn:
        """Return the loss of ``actor.algorithm`` or, without an algorithm, the loss that ``actor.loss_type`` selects."""
        return preference_loss(self.config.actor)


def preference_loss(actor: DPOEngineConfig) -> LossFn:
    """Return the preference loss that the ``actor`` section configures.

    If ``actor.algorithm`` is set, return the loss of this algorithm. If this loss was made with the decorator
    :func:`areno.loss_fns.units.mean_loss`, it reports its statistics under the same names as the DPO loss.

    If ``actor.algorithm`` is not set, ``actor.loss_type`` selects the loss. IPO compares log-probs averaged per token, so its
    target 1 / (2 beta) does not depend on the length.
    """
    if actor.algorithm:
        spec, options = named_algorithm(actor)
        loss = functools.partial(cast(LossFn, spec.make_loss_fn(options)))
        return with_names(loss.func, DPO.names, **loss.keywords) if hasattr(loss.func, "units") else loss
    return DPO.experiment_loss(
        beta=actor.beta,
        loss_type=actor.loss_type,
        label_smoothing=actor.label_smoothing,
        length_normalized=actor.loss_type == "ipo",
    )
