"""The skeleton of every training run: epochs, steps, metrics, evaluation, checkpoints, resume, and a clean end.

An algorithm's trainer supplies batches, one step, and what an evaluation measures. The contract of a trainer class is
``cls(config, *, instance, dataset, reward_fn, loss_fn)`` with ``fit()``. An evaluation belongs to a number of completed
steps, as a checkpoint does, and leaves no trace in training: random state and step times are as if it had not been.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areno.api.datasets import epoch_order
from areno.api.metrics import MetricsRecorder
from areno.api.trainer import Trainer
from areno.api.trainers.state import Progress
from areno.api.trainers.stopping import StopController, StopRequested
from areno.config.algorithms import get_algorithm
from areno.config.train_options import TrainOptions
from areno.config.yaml_io import dump_config
from areno.engine.checkpoint.contents import read_state, write_state
from areno.engine.checkpoint.folder import CheckpointFolder
from areno.engine.checkpoint.rng import capture_rng, restore_rng
from areno.errors import ArenoError, UsageError
from areno.observability import lifecycle
from areno.observability.display import create_progress
from areno.observability.health import LOGPROB_GAP_LIMIT, LOGPROB_GAP_LIMIT_FP32, HealthMonitor, unusable
from areno.observability.run_dir import RunDirectory
from areno.types import TrainSequence, tightest


@dataclass(slots=True)
class StepOutcome:
    """What one step produced.

    Attributes:
        rows: rows that were trained on.
        stats: scalar statistics.
        timings: seconds of ``rollout``, ``reward``, ``advantage``, ``train``, where they apply.
        rewards: one per kept sample; None without rewards.
        groups: prompt index of each of these samples.
        sample: one completion to show.
        skipped_long: over-long prompts passed over for this step.
    """

    rows: list[TrainSequence]
    stats: dict[str, float]
    timings: dict[str, float]
    rewards: list[float] | None = None
    groups: list[int] | None = None
    sample: str | None = None
    skipped_long: int = 0


class TrainingLoop(ABC):
    """Base of the trainers.

    Args:
        config: resolved options of the run.
        instance: initialized :class:`areno.Trainer`.
        dataset: rows, indexable.
        reward_fn: reward function, where the algorithm needs one.
        loss_fn: loss of the optimizer steps.

    Attributes:
        eval_rows: held-out rows, in the run's schema; None evaluates nothing.
        best_metric: metric of :meth:`evaluate` that says which checkpoint is the best.
        resumed_from: checkpoint whose weights the instance has loaded; None begins at the first step.
        best_is_higher: whether a higher value of it is better.
    """

    logger: logging.Logger
    best_metric: str = "loss"
    best_is_higher: bool = False

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
        self.eval_rows: Sequence[dict[str, Any]] | None = None
        self.resumed_from: Path | None = None
        self.run_dir = RunDirectory(config.run_path)
        self.checkpoints = CheckpointFolder(config.checkpoint_path, config.keep_checkpoints)
        self.stop = StopController()
        self.state = Progress()
        fp32 = instance.backend.compute_dtype() == "float32"
        self.health = HealthMonitor(
            logprob_gap_limit=LOGPROB_GAP_LIMIT_FP32 if fp32 else LOGPROB_GAP_LIMIT,
            grouped=get_algorithm(config.algo).min_samples > 1,
            max_new_tokens=config.max_new_tokens if config.agent_fn is None else None,
        )
        self.display = create_progress()
        self._saved_step = 0
        self._updating = False
        self._recorder: MetricsRecorder | None = None

    # -- what an algorithm supplies --------------------------------------------------------------------------------

    @abstractmethod
    def batches(self, order: Sequence[int], start: int) -> Iterator[tuple[Any, int]]:
        """Batches of an epoch from position ``start`` of ``order``, each with the position after it."""

    @abstractmethod
    def run_step(self, batch: Any) -> StepOutcome:
        """Do one step; work that can be repeated belongs inside ``self.stop.interruptible()``."""

    @property
    def context_limit(self) -> int | None:
        """Most tokens of a row: the smaller of ``--max-context-len`` and the model's own limit."""
        return tightest(self.config.max_context_len, self.instance.model_context_len())

    def row_count(self) -> int:
        """Rows of an epoch."""
        return len(self.dataset)

    def evaluate(self, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Measure the model on held-out rows; it may be interrupted at any moment, and must not train.

        Returns:
            Metrics by short name, ``best_metric`` among them.
        """
        raise UsageError(
            f"--eval-dataset-path {self.config.eval_dataset_path}: {type(self).__name__} has no evaluation; leave the "
            "option out, or give the trainer a method evaluate(rows)"
        )

    def load_models(self) -> None:  # noqa: B027  (not every algorithm has further models)
        """Called once before the state of a resumed run is restored: ensure the models that it needs besides the policy."""

    def prepare(self) -> None:  # noqa: B027  (or prepares anything)
        """Called once before the first step, with the state restored."""

    def cleanup(self) -> None:  # noqa: B027  (or holds anything)
        """Called once at the end, whatever happened."""

    # -- the run ---------------------------------------------------------------------------------------------------

    def fit(self) -> Progress:
        """Run to the end, or to a stop; the last completed step is always saved.

        Returns:
            How far the run came.

        Raises:
            StopRequested: a signal ended the run; its last completed step is saved.
        """
        if self.eval_rows is not None and type(self).evaluate is TrainingLoop.evaluate:
            self.evaluate(self.eval_rows)  # says at once that it cannot, and not after the first steps
        try:
            self.load_models()
            self._restore()
            self.prepare()
            self.run_dir.write_config(dump_config(self.config))
            self.state.rng = capture_rng()
            self.display.start(self.total_steps(), self.state.step)
            self._evaluate_if_due()
            self._epochs()
            self._evaluate()
            self._save()
        except BaseException as error:
            self.display.stop()
            self._rescue(error)
            raise
        finally:
            self.display.stop()
            self.cleanup()
            if self._recorder is not None:
                self._recorder.close()
        return self.state

    def total_steps(self) -> int:
        """Steps of the whole run, were no row skipped."""
        per_epoch = -(-self.row_count() // self.config.batch_size)
        total = per_epoch * self.config.epochs
        return min(total, self.config.max_steps) if self.config.max_steps else total

    def _finished(self) -> bool:
        return self.config.max_steps is not None and self.state.step >= self.config.max_steps

    def _epochs(self) -> None:
        while self.state.epoch < self.config.epochs and not self._finished():
            epoch = self.state.epoch
            lifecycle.epoch_start(self.logger, epoch)
            order = epoch_order(self.row_count(), epoch=epoch, seed=self.config.seed, shuffle=self.config.shuffle)
            for batch, position in self.batches(order, self.state.position):
                self.stop.check()
                self._step(batch, position)
                if self._finished():
                    lifecycle.max_steps_reached(self.logger, epoch, self.state.step - 1)
                    return
            self.state.epoch, self.state.position = epoch + 1, 0
            lifecycle.epoch_end(self.logger, epoch)

    def _step(self, batch: Any, position: int) -> None:
        step, epoch, began = self.state.step, self.state.epoch, time.perf_counter()
        outcome = self.run_step(batch)
        outcome.stats["step_wall_time_s"] = time.perf_counter() - began
        lifecycle.train_stats(self.logger, epoch, step, outcome.stats)
        self._observe(step, outcome)
        self.state.skipped_long += outcome.skipped_long
        self._record(step, outcome)
        if self.state.unusable is None and unusable(outcome.stats):
            self.state.unusable = self.checkpoints.sound_until = step
        self.state.step, self.state.position = step + 1, position
        self.state.health, self.state.rng = self.health.state_dict(), capture_rng()
        self._updating = False
        self.display.step_done(step, outcome.stats, outcome.sample)
        self._evaluate_if_due()
        if self.state.step % self.config.save_interval == 0:
            self._save()

    def train(self, rows: list[TrainSequence]) -> dict[str, float]:
        """One train call with the run's loss and sizes; not interrupted by a signal."""
        self._updating = True  # until the step is complete, the weights belong to no step that could be saved
        return self.instance.train(rows, self.loss_fn, self.config.mini_bs, self.config.gradient_accumulation_steps)

    def _observe(self, step: int, outcome: StepOutcome) -> None:
        rows = outcome.rows
        groups = [row.group for row in rows] if outcome.groups is None else outcome.groups
        truncated = [row.truncated for row in rows]
        has_rewards = outcome.rewards is not None
        warnings = self.health.observe(
            step,
            outcome.stats,
            rewards=outcome.rewards or [],
            groups=groups if has_rewards else [],
            truncated=truncated if has_rewards else [],
        )
        for warning in warnings:
            self.display.warn(warning)
        if note := self.health.explain(step, outcome.stats, outcome.rewards or []):
            self.logger.info(note)

    def _metrics(self) -> MetricsRecorder:
        if self._recorder is None:
            purge = self.state.step if self.config.resume else None
            self._recorder = MetricsRecorder(self.config.events_path, self.run_dir, purge)
        return self._recorder

    def _record(self, step: int, outcome: StepOutcome) -> None:
        self._metrics().record_step(
            step,
            rows=outcome.rows,
            train_stats=outcome.stats,
            timings=outcome.timings,
            skipped_long=outcome.skipped_long,
            total_skipped_long=self.state.skipped_long,
            rewards=outcome.rewards,
        )

    # -- evaluation ------------------------------------------------------------------------------------------------

    def _evaluate_if_due(self) -> None:
        step = self.state.step
        if step % self.config.eval_interval == 0 if step else self.config.eval_before_train:
            self._evaluate()

    def _evaluate(self) -> None:
        """Measure the model as it is after the completed steps, unless that is done already."""
        step, done = self.state.step, self.state.evaluation
        if self.eval_rows is None or (done is not None and done["step"] == step):
            return
        self.display.phase("evaluate")
        rng, began = capture_rng(), time.perf_counter()
        with self.stop.interruptible():
            metrics = self.evaluate(self.eval_rows)
        restore_rng(rng)
        metrics.setdefault("eval_time_s", time.perf_counter() - began)
        lifecycle.evaluation(self.logger, self.state.epoch, step, metrics)
        self.state.evaluation = {"step": step, "metrics": metrics, "settings": self._evaluation_settings()}
        self._record_evaluation(step, metrics)
        improved = self._update_best(metrics)
        if step and step == self._saved_step:
            write_state(self.checkpoints.path(step), self.state.to_json())
        # What the run started from is not a checkpoint of it: --ckpt is there already.
        if improved and step and self.config.keep_best:
            self._save_best()

    def _evaluation_settings(self) -> dict[str, Any]:
        """What two evaluations must share to be comparable, besides what no resumed run may change."""
        names = ("eval_dataset_path", "eval_dataset_loader_fn", "eval_max_rows", "eval_n_samples", "eval_temperature")
        return {name: getattr(self.config, name) for name in names}

    def _record_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self._metrics().record_scalars(step, {f"eval/{name}": value for name, value in metrics.items()})

    def _update_best(self, metrics: dict[str, float]) -> bool:
        """Remember the evaluation if it is the best one so far; a tie is not, nor is NaN."""
        name, best = self.best_metric, self.state.best
        if name not in metrics:
            raise ArenoError(
                f"evaluate() of {type(self).__name__} gave no {name!r}, its best_metric; got {sorted(metrics)}"
            )
        value = metrics[name]
        if best is None:
            improved = not math.isnan(value)
        else:
            improved = value > best["value"] if self.best_is_higher else value < best["value"]
        if improved:
            best = self.state.best = {"step": self.state.step, "metric": name, "value": value}
        shown = f"{name} {value:.4g} after {self.state.step} steps"
        self.display.evaluated(shown if best is None else f"{shown}, best {best['value']:.4g} after {best['step']}")
        return improved

    def _restore_evaluation(self) -> None:
        """Write the evaluation of the restored step again, whose line was dropped with those of later steps."""
        done = self.state.evaluation
        if done is None:
            return
        if done["step"] == self.state.step:
            self._record_evaluation(done["step"], done["metrics"])
        if done["settings"] != self._evaluation_settings():
            self.logger.info("the evaluation options are not those of the run so far: the best evaluation starts anew")
            self.state.evaluation = self.state.best = None

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Save the last completed step, unless that is done already."""
        step = self.state.step
        if step == self._saved_step:
            return
        best = self.checkpoints.best if self.checkpoints.best_step() == step else None
        with (
            self._saving(self.checkpoints.path(step)),
            self.checkpoints.writing(step, self._needed_bytes(best), copy_of=best) as folder,
        ):
            self._fill(folder, best)
        self._saved_step = step

    def _save_best(self) -> None:
        """Keep the last completed step as the best one."""
        step = self.state.step
        same = self.checkpoints.path(step) if step == self._saved_step else None
        with (
            self._saving(self.checkpoints.best),
            self.checkpoints.writing_best(self._needed_bytes(same), copy_of=same) as folder,
        ):
            self._fill(folder, same)

    @contextmanager
    def _saving(self, path: Path) -> Iterator[None]:
        """Show and log that a checkpoint is written."""
        epoch, step = self.state.epoch, self.state.step
        self.display.phase("save")
        lifecycle.save_checkpoint_start(self.logger, epoch, step - 1, path)
        yield
        lifecycle.save_checkpoint_end(self.logger, epoch, step - 1, path)

    def _needed_bytes(self, copied: Path | None) -> int:
        return 0 if copied else self.instance.backend.checkpoint_bytes()

    def _fill(self, folder: Path, copied: Path | None) -> None:
        """Write the checkpoint; where the folder holds a copy of one of the same step, only what may differ."""
        if copied is None:
            self.instance.backend.save_model(folder)
            self.instance.backend.save_state(folder)
        write_state(folder, self.state.to_json())

    def _restore(self) -> None:
        """Continue from a checkpoint when the run is resumed; steps after it will be done again."""
        self.checkpoints.clear_leftovers()
        if not self.config.resume:
            return
        checkpoint = self.resumed_from
        if checkpoint is not None:
            self.state = Progress.from_json(read_state(checkpoint))
            self.instance.backend.load_state(checkpoint)
            self.health.load_state_dict(self.state.health)
            restore_rng(self.state.rng)
            self._saved_step = self.state.step if checkpoint != self.checkpoints.best else 0
            self.logger.info("resumed from %s: %d steps are done", checkpoint, self.state.step)
            self.checkpoints.sound_until = self.state.unusable
            self.checkpoints.rewind(self.state.step)
            self.checkpoints.prune()
        self.run_dir.truncate_after(self.state.step - 1)
        self._restore_evaluation()

    def _rescue(self, error: BaseException) -> None:
        """Save what is complete before an error or a stop ends the run; a second Ctrl-C skips that."""
        if isinstance(error, KeyboardInterrupt):
            return
        if self._updating:
            self.logger.error(
                "ended inside an update; the newest checkpoint is the one after step %d", self._saved_step
            )
            return
        if isinstance(error, StopRequested):
            self.logger.warning("%s: stopping after %d steps", error, self.state.step)
        try:
            self._save()
        except ArenoError as failure:
            self.logger.error("the last steps could not be saved: %s", failure)
