"""Base class of the trainers of ``areno train``.

The class iterates over the dataset for one or more epochs. In each step, a trainer converts one batch of the dataset to
training rows (:class:`~areno.types.TrainSequence`), and trains the model on these rows.

A trainer class is called as ``cls(config, *, instance, dataset, reward_fn, loss_fn)`` and has a method ``fit()``.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from areno.api.trainer import Trainer
from areno.api.trainers.step_reporter import StepReporter
from areno.config.algorithms import get_algorithm
from areno.config.all_train_options import TrainOptions
from areno.config.options import options_of
from areno.config.run_options import EvaluationOptions
from areno.config.yaml_io import stored_value
from areno.engine.rollout.counter_rng import epoch_order
from areno.errors import UsageError
from areno.observability import log_lines, tracing
from areno.observability.data_size import data_size
from areno.observability.health import HealthMonitor, gap_limit_of
from areno.spec import CheckpointSpec, Frequency, RunSpec, Span
from areno.storage.checkpoint_folder import DISK_REMEDY
from areno.storage.run_dir import RunDirectory
from areno.storage.run_layout import OPTIONS
from areno.training.frequency import StepInfo
from areno.training.loop import PlannedStep, TrainingLoop
from areno.training.saving import Saver
from areno.training.state import RunState
from areno.types import TrainSequence, tightest

_NO_LAST_STEP = 2**62
"""Placeholder for the number of steps, which depends on how many rows are too long and therefore skipped."""


def spec_of(config: TrainOptions) -> RunSpec:
    """Return the length of the run, and the settings for evaluation, checkpoints and early stopping."""
    minutes = config.save_interval_minutes
    names = ("eval_dataset_path", "eval_dataset_loader_fn", "eval_max_rows", "eval_n_samples", "eval_temperature")
    return RunSpec(
        span=Span(config.max_steps, config.max_sequences),
        evaluation=Frequency(steps=config.eval_interval, first=config.eval_before_train, last=True),
        evaluated_with={
            entry.name: stored_value(entry, getattr(config, entry.name))  # the paths of a resumed run are absolute
            for entry in options_of(EvaluationOptions)
            if entry.name in names
        },
        checkpoints=CheckpointSpec(
            config.checkpoint_path,
            Frequency(steps=config.save_interval, seconds=None if minutes is None else 60 * minutes, last=True),
            newest=config.keep_checkpoints,
            best=config.keep_best,
            remedy=DISK_REMEDY,
        ),
        patience=config.early_stop_patience,
        resumed=bool(config.resume),
    )


def optimizer_settings(config: TrainOptions, prefix: str = "") -> dict[str, Any]:
    """Return fields of ``OptimizerOptions``.

    With the prefix ``critic_``, the learning rate and the gradient clipping are those of the critic.
    """
    rate = ("lr", "min_lr", "lr_decay_steps", "lr_decay_style", "lr_warmup_steps", "grad_clip_norm")
    return {name: getattr(config, f"{prefix}{name}") for name in rate} | {
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
        "adam_8bit": config.adam_8bit,
        "offload": config.offload_optimizer,
    }


class DatasetTrainer(TrainingLoop):
    """Base class of the trainers of ``areno train``. ``eval_rows`` have the same columns as the training rows."""

    def __init__(
        self,
        config: TrainOptions,
        *,
        instance: Trainer,
        dataset: Sequence[dict[str, Any]],
        reward_fn: Callable[..., Any] | None,
        loss_fn: Callable[..., Any],
    ) -> None:
        self.config, self.instance, self.dataset = config, instance, dataset
        self.reward_fn, self.loss_fn = reward_fn, loss_fn
        fp32 = instance.backend.config.compute_dtype == "float32"
        health = HealthMonitor(
            logprob_gap_limit=gap_limit_of(fp32=fp32, stale=bool(config.most_behind)),
            grouped=get_algorithm(config.algo).min_samples > 1,
            max_new_tokens=config.max_new_tokens if config.agent_fn is None and config.workflow is None else None,
        )
        traced = {"enabled": config.trace}
        tracing.configure(config.run_path, "trainer", perf=traced, session=traced)
        if config.model_save_interval is not None:
            every, mode = Frequency(steps=config.model_save_interval), "auto" if config.save_async else "sync"
            self.saver = Saver(config.checkpoint_path, every, self.saved_roles, mode, OPTIONS, DISK_REMEDY)
        self.set_up(spec_of(config), instance.backend, StepReporter(config, self.logger, health))

    @abstractmethod
    def batches(self, order: Sequence[int], start: int) -> Iterator[tuple[Any, int]]:
        """Yield ``(batch, position)`` for each batch of ``order[start:]``. The remaining rows are ``order[position:]``."""

    def row_count(self) -> int:
        """Return the number of rows per epoch."""
        return len(self.dataset)

    def evaluate(self, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Evaluate the held-out rows, and return metrics.

        The attribute ``best_metric`` names the metric that decides which checkpoint is the best. A signal may interrupt this
        method.
        """
        raise UsageError(
            f"--eval-dataset-path {self.config.eval_dataset_path}: the trainer {type(self).__name__} has no evaluation; "
            "remove the option, or implement evaluate(rows) in the trainer"
        )

    @property
    def run_dir(self) -> RunDirectory:
        """The run directory."""
        return self.report.run_dir

    @property
    def context_limit(self) -> int | None:
        """Maximum number of tokens per row: the smaller of ``--max-context-len`` and the model's limit."""
        return tightest(self.config.max_context_len, self.instance.model_context_len())

    def fit(self) -> RunState:
        """Train until the run ends or a signal stops the run; see :meth:`TrainingLoop.fit`."""
        if self.eval_rows is not None and type(self).evaluate is DatasetTrainer.evaluate:
            self.evaluate(self.eval_rows)  # raises now instead of after the first steps
        try:
            return super().fit()
        finally:
            self.report.close()
            tracing.save(force=True)
            if self.saver is not None:
                self.saver.close()

    def total_steps(self) -> int:
        """Return the maximum number of steps of the run."""
        total = self._steps_per_epoch() * self.config.epochs
        return min(total, self.config.max_steps) if self.config.max_steps else total

    def data_size(self) -> dict[str, int]:
        """Return the sizes of the datasets; {} for ``areno replay``, which has no dataset."""
        return data_size(self.dataset, self.eval_rows, self._steps_per_epoch()) if len(self.dataset) else {}

    def _steps_per_epoch(self) -> int:
        return -(-self.row_count() // self.config.batch_size)

    def steps(self) -> Iterator[PlannedStep]:
        """Yield the steps of all epochs."""
        config, state = self.config, self.state
        planned = self.looked_ahead(self._planned())
        upcoming = None if self.finished() else next(planned, None)
        while state.epoch < config.epochs and not self.finished():
            log_lines.epoch_start(self.logger, state.epoch)
            while upcoming is not None and upcoming.at.epoch == state.epoch:
                yield upcoming
                if config.max_steps is not None and state.step >= config.max_steps:
                    log_lines.max_steps_reached(self.logger, state.epoch, state.step - 1)
                if self.finished():
                    return
                upcoming = next(planned, None)
            log_lines.epoch_end(self.logger, state.epoch)
            state.epoch, state.epoch_step, state.position = state.epoch + 1, 0, 0

    def looked_ahead(self, planned: Iterator[PlannedStep]) -> Iterator[PlannedStep]:
        """Yield the steps in ``planned``. A subclass may start the work on later steps before it yields a step."""
        return planned

    def _planned(self) -> Iterator[PlannedStep]:
        """Yield all remaining steps of the run, without changing the run's state."""
        config, state = self.config, self.state
        number, epoch_step, position, most = state.step, state.epoch_step, state.position, config.max_steps
        for epoch in range(state.epoch, config.epochs):
            order = epoch_order(self.row_count(), epoch=epoch, seed=config.seed, shuffle=config.shuffle)
            for batch, after in self.batches(order, position):
                if most is not None and number >= most:
                    return
                yield PlannedStep(
                    batch, StepInfo(epoch, epoch_step, number, self._steps_per_epoch(), _NO_LAST_STEP), after
                )
                number, epoch_step = number + 1, epoch_step + 1
            epoch_step = position = 0

    def train(self, rows: list[TrainSequence]) -> dict[str, float]:
        """Train on rows with the run's loss and batch sizes.

        A stop signal, such as SIGINT, does not interrupt the update. A second stop signal aborts it.
        """
        self._updating = True  # until the step is complete, the weights cannot be saved
        with self.timed("train_step"):
            return self.instance.train(rows, self.loss_fn, self.config.mini_bs, self.config.gradient_accumulation_steps)

    def measure(self) -> dict[str, float]:
        """Run :meth:`evaluate` on the held-out rows, and add ``eval_time_s`` to the metrics."""
        assert self.eval_rows is not None
        start = time.perf_counter()
        with self.stop.interruptible():
            metrics = self.evaluate(self.eval_rows)
        metrics.setdefault("eval_time_s", time.perf_counter() - start)
        return metrics
