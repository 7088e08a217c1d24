"""The training loop of ``areno train`` and ``areno run``: steps, evaluation, checkpoints, resume, and clean shutdown.

A step is the method ``run_step`` of an algorithm's trainer. The trainers of ``areno train`` are in
``areno/api/trainers/rollout_trainer.py`` and ``supervised.py``. The trainers of ``areno run`` are in
``areno/experiments/trainers/rl.py`` and ``supervised.py``.

A trainer supplies the batches, the code of a step, and the measurements of an evaluation. After each step, the loop reports
statistics and, if due, saves models, evaluates, and writes a checkpoint. A resumed run reports no step twice. Evaluations
do not affect training: they change neither the random state nor the step times.
"""

import functools
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areno.config.saved_rollouts import kept_rollouts
from areno.engine.backend import Backend
from areno.engine.checkpoint.rng import capture_rng, restore_rng
from areno.engine.engine import ACTOR, Engine
from areno.engine.plan.trial import gpu_bytes
from areno.errors import ArenoError
from areno.observability import tracing
from areno.observability.display import ProgressDisplay
from areno.observability.step_memory import StepMemory
from areno.spec.run_spec import RunSpec
from areno.storage.rollout_files import RolloutFiles
from areno.storage.run_layout import ACTOR_MODELS
from areno.training.checkpoints import Checkpoints
from areno.training.frequency import FrequencyControl, StepInfo
from areno.training.reporter import Reporter, StepOutcome
from areno.training.saved_rows import arrays_of
from areno.training.saving import Saver
from areno.training.state import RunState
from areno.training.stopping import StopController, StopRequested
from areno.types import TokenRecord, TrainSequence


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step to run, with its batch and its place in the run.

    ``position`` is the number of rows of the epoch, including skipped rows, that have been consumed when the step ends.
    """

    batch: Any
    at: StepInfo
    position: int = 0


class TrainingLoop(ABC):
    """Base class of the trainers; see the module docstring."""

    logger: logging.Logger
    best_metric: str = "loss"  # metric of :meth:`measure` that decides which checkpoint is the best
    best_is_higher: bool = False
    # whether evaluations may lack ``best_metric``; those without it are never the best
    best_may_be_missing: bool = False
    stop: StopController
    saved_roles: Sequence[str] = (ACTOR_MODELS,)  # models saved in addition to checkpoints; the first is the actor
    saver: Saver | None = None  # saves the models of ``saved_roles``; None: no models are saved
    resumed_from: Path | None = None  # checkpoint whose weights are already loaded; None starts at the first step
    eval_rows: Sequence[Any] | None = None  # held-out rows; None disables evaluation
    rollouts: RolloutFiles | None = None  # saves the rows of each step; None saves none

    def set_up(self, spec: RunSpec, backend: Backend, report: Reporter, checkpoints: Checkpoints | None = None) -> None:
        """Set the components that the loop uses. By default, ``checkpoints`` is created from ``spec``."""
        self.spec, self.backend, self.report = spec, backend, report
        self.stop = StopController()
        self.state = RunState()
        self.checkpointing = checkpoints or Checkpoints(spec.checkpoints)
        self.checkpointing.writing = lambda path: self.report.writing(path, self.state)
        self.evaluation = FrequencyControl(spec.evaluation)
        self._memory = StepMemory(lambda: max(backend.run_on_all_ranks(gpu_bytes)))
        self._updating = self._restoring = False

    @property
    def display(self) -> ProgressDisplay:
        """The progress display of the run."""
        return self.report.display

    @abstractmethod
    def steps(self) -> Iterator[PlannedStep]:
        """Yield the remaining planned steps of the run. ``self.state`` records the progress so far."""

    @abstractmethod
    def run_step(self, batch: Any) -> StepOutcome:
        """Run one step.

        Generation, and other work that a resumed run can repeat, must run inside ``with self.stop.interruptible()``. A signal
        interrupts this block at once.
        """

    @abstractmethod
    def measure(self) -> dict[str, float]:
        """Measure the model on the held-out rows. The method may be interrupted at any time, and must not train."""

    @abstractmethod
    def total_steps(self) -> int:
        """Return the number of steps of the run, assuming that no row is skipped."""

    def data_size(self) -> dict[str, int]:
        """Return the sizes of the data, as :func:`areno.observability.data_size.data_size` does; {} if unknown."""
        return {}

    def load_models(self) -> None:  # noqa: B027  (not every algorithm has further models)
        """Load all models except the policy. Called once, before the state is restored."""

    def prepare(self) -> None:  # noqa: B027  (not every algorithm prepares anything)
        """Prepare the run. Called once, after the state is restored and before the first step."""

    def start_fresh(self) -> None:
        """Start the run without a checkpoint. Called once, instead of restoring the state."""
        if self.spec.resumed:
            self.report.rewind(self.state)

    def save_models(self, at: StepInfo) -> None:
        """Save each model for which a save is due after this step. After the last step, wait until all models are written."""
        if self.saver is None:
            return
        for role in self.saved_roles:
            name = ACTOR if role == ACTOR_MODELS else role
            write = functools.partial(self.backend.save_model, role=name)
            self.saver.save_if_due(role, at, write, stage=self._stage(name))
        if at.is_last:
            self.saver.wait()

    def _stage(self, role: str) -> Callable[[], Any] | None:
        """Return a function that copies a model for asynchronous saving; None if the model cannot be copied."""
        engine = self.backend
        if not isinstance(engine, Engine) or engine.role(role).model.adapter is not None:
            return None
        return lambda: engine.role(role).stage_model(engine.tokenizer)

    def rollout_state(self) -> Any:
        """Return the rollout state for checkpoints, or None. :mod:`areno.training.plain_objects` lists the allowed types."""
        return None

    def part_states(self) -> dict[str, Any]:
        """Return the trainer's own state for checkpoints, such as the position in the data, as JSON values."""
        return {}

    def load_part_states(self, parts: dict[str, Any], checkpoint: Path) -> None:  # noqa: B027  (most have nothing more)
        """Restore the values that :meth:`part_states` and :meth:`rollout_state` returned for ``checkpoint``.

        Called after the weights have been loaded. ``parts`` contains only the values of :meth:`part_states`. To get the value
        of :meth:`rollout_state`, call :func:`areno.training.checkpoints.rollout_state` with ``checkpoint``.
        """

    def save_at_stop(self) -> None:
        """Save the completed steps. Called when a signal or an error stops the run between two updates."""
        self.checkpoint()

    def end(self) -> None:  # noqa: B027  (not every trainer needs it)
        """Finish the run. Called once after the last step, but not if the run was stopped or failed."""

    def cleanup(self) -> None:  # noqa: B027  (not every trainer holds resources)
        """Release resources. Called once at the end, even after an error."""

    def keep_rollouts(self, steps: str | None) -> None:
        """Save the rows of each following step, and keep only the rows of the newest ``steps`` steps.

        ``steps`` is a number or ``all``. A trainer saves no rows until this method is called. If ``steps`` is None, the call
        has no effect.
        """
        if kept := kept_rollouts(steps):
            self.rollouts = RolloutFiles(self.report.run_dir.rollouts_path, kept)

    def save_rows(self, rows: Sequence[TrainSequence], samples: Sequence[int]) -> None:
        """Save the rows of the current step, if the run saves rows. ``samples`` holds the sample index of each row."""
        if self.rollouts is not None:
            self.rollouts.write(self.state.step, arrays_of(rows, samples))

    def token_records(self) -> dict[int, TokenRecord]:
        """Return the token records of the last update, and clear them. Returns {} if there are no records.

        The key of a record is :attr:`TrainSequence.observed` of its row.
        """
        return getattr(self.backend, "take_token_records", dict)()

    def timed(self, key: str) -> AbstractContextManager[Any]:
        """Measure the time of a ``with`` block under the name ``key``. This base class writes the time only to the trace."""
        return tracing.trace_scope(key)

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        """Trace a ``with`` block that runs a complete step."""
        with tracing.perf_tracer().step(step):
            yield
        tracing.save(step)

    def fit(self) -> RunState:
        """Run all steps, and return the state. After an error or a signal (StopRequested), save the completed steps.

        Nothing is saved if the error or signal came during an update, or before the state was restored from the checkpoint.
        """
        try:
            self._restoring = True
            self.load_models()
            self._restore()
            self._restoring = False
            self.prepare()
            self.state.rng = capture_rng()
            self.report.begin(self.total_steps(), self.state.step, self.data_size())
            if self.evaluation.due_before_training() or self.state.evaluation_due:
                self._evaluate()
            self._all_steps()
            if self.saver is not None:
                self.saver.wait()
            self.end()
        except BaseException as error:
            self.display.stop()
            self._rescue(error)
            raise
        finally:
            self.display.stop()
            self.cleanup()
        return self.state

    def _all_steps(self) -> None:
        for planned in self.steps():
            self.stop.check()
            with self.around_step(planned.at.global_step):
                self._step(planned)
        if self.spec.evaluation.last:
            self._evaluate()
        if self.spec.checkpoints.every.last:
            self.checkpoint()

    def finished(self) -> bool:
        """Return whether the run has reached its limit of steps, of sequences, or of evaluations without a new best result.

        The number of epochs is enforced by :meth:`steps`.
        """
        span, state = self.spec.span, self.state
        limits = ((span.steps, state.step), (span.sequences, state.sequences), (self.spec.patience, state.not_best))
        return any(limit is not None and reached >= limit for limit, reached in limits)

    def _step(self, planned: PlannedStep) -> None:
        at, report, began = planned.at, self.report, time.perf_counter()
        with self.timed("step"):
            outcome = self.run_step(planned.batch)
        outcome.seconds, outcome.memory = time.perf_counter() - began, self._memory.figures()
        self.state.sequences += len(outcome.rows) if outcome.sequences is None else outcome.sequences
        self.state.skipped_long += outcome.skipped_long
        if self.spec.span.sequences is not None and self.state.sequences >= self.spec.span.sequences:
            at = replace(at, total_steps=at.global_step + 1)
        if not report.joins_evaluation:
            report.record_step(at, outcome, self.state)
        if not report.observe(at.global_step, outcome) and self.state.unusable is None:
            self.state.unusable = self.checkpointing.folder.sound_until = at.global_step
        self._advance(planned)
        report.show(at.global_step, outcome)
        with self.timed("save"):
            self.save_models(at)
        try:
            outcome.stats |= self._evaluate_if_due(at)
        finally:  # a stop may interrupt the evaluation
            if report.joins_evaluation:
                report.record_step(at, outcome, self.state)
        with self.timed("checkpoint_for_recover"):
            if self.checkpointing.due(at):
                self.checkpoint()

    def _advance(self, planned: PlannedStep) -> None:
        state, at = self.state, planned.at
        state.step, state.position = at.global_step + 1, planned.position
        state.epoch, state.epoch_step = at.epoch, at.epoch_step + 1
        state.health, state.rng = self.report.health.state_dict(), capture_rng()
        self._updating = False

    def _evaluate_if_due(self, at: StepInfo) -> dict[str, float]:
        if self.eval_rows is None:
            return {}
        self.state.evaluation_due |= self.evaluation.check(at)
        if not self.state.evaluation_due:
            return {}
        return self._evaluate(apart=not self.report.joins_evaluation)

    def _evaluate(self, apart: bool = True) -> dict[str, float]:
        """Evaluate the model on the held-out rows, unless it was already evaluated after the same number of steps.

        If ``apart`` is true, write the metrics as a separate record, and return {}. Otherwise, return the metrics; {} if the
        model was not evaluated.
        """
        step, previous = self.state.step, self.state.evaluation
        if self.eval_rows is None or (previous is not None and previous["step"] == step):
            return {}
        self.display.phase("evaluate")
        rng = capture_rng()
        with self.timed("eval"):
            metrics = self.measure()
        restore_rng(rng)
        self.state.evaluation = {"step": step, "metrics": metrics, "settings": self.spec.evaluated_with}
        self.state.evaluation_due = False
        if apart:
            self.report.record_evaluation(self.state, metrics)
        improved = self._update_best(metrics)
        self.checkpointing.update(self.state)
        # The initial model is not saved as the best checkpoint: it exists already.
        if improved and step and self.spec.checkpoints.best:
            self._note_parts()
            self.checkpointing.save_best(self.state, self.backend, self.rollout_state)
        return {} if apart else metrics

    def _update_best(self, metrics: dict[str, float]) -> bool:
        """If an evaluation is better than all earlier evaluations, record it as the best. Return whether it is better.

        NaN is never better.
        """
        name, best = self.best_metric, self.state.best
        if name not in metrics:
            if self.best_may_be_missing:
                return False
            raise ArenoError(
                f"evaluate() of {type(self).__name__} must return its best_metric {name!r}, but returned only "
                f"{', '.join(sorted(metrics))}"
            )
        value = metrics[name]
        if best is None:
            improved = not math.isnan(value)
        else:
            improved = value > best["value"] if self.best_is_higher else value < best["value"]
        self.state.not_best = 0 if improved else self.state.not_best + 1
        if improved:
            best = self.state.best = {"step": self.state.step, "metric": name, "value": value}
        shown = f"{name} {value:.4g} after {self.state.step} steps"
        if self.state.not_best == self.spec.patience:
            self.logger.info(
                "none of the last %d evaluations had a new best result, so the run stops", self.state.not_best
            )
        self.display.evaluated(shown if best is None else f"{shown}, best {best['value']:.4g} after {best['step']}")
        return improved

    def _restore_evaluation(self) -> None:
        """Restore the last and the best evaluation from the checkpoint.

        If the last evaluation was at the restored step, its metrics are recorded again, because resuming has deleted the record
        of this evaluation. If the evaluation settings have changed, the last and the best evaluation are discarded.
        """
        previous = self.state.evaluation
        if previous is None:
            return
        if previous["step"] == self.state.step and not self.report.joins_evaluation:
            self.report.record_evaluation(self.state, previous["metrics"], again=True)
        if previous["settings"] != self.spec.evaluated_with:
            self.logger.info("the evaluation options have changed, so the best evaluation so far is discarded")
            self.state.evaluation = self.state.best = None
            self.state.not_best, self.state.evaluation_due = 0, True

    def checkpoint(self) -> None:
        """Write the checkpoint of the last completed step, unless it exists or checkpoints are disabled."""
        if self.spec.checkpoints.enabled:
            self._note_parts()
            self.checkpointing.save(self.state, self.backend, self.rollout_state)
            self.report.html_report.refresh()

    def _note_parts(self) -> None:
        frequencies = {"evaluation": self.evaluation, "checkpoints": self.checkpointing.frequency}
        self.state.parts = {name: control.state_dict() for name, control in frequencies.items()}
        saver = {} if self.saver is None else {"saver": self.saver.state_dict()}
        self.state.parts |= {"report": self.report.state_dict(), **saver, **self.part_states()}

    def _restore(self) -> None:
        """Restore the state of the checkpoint ``resumed_from``. Without a checkpoint, call :meth:`start_fresh`."""
        checkpoint = self.resumed_from
        if checkpoint is None:
            self.start_fresh()
            return
        self.state = state = RunState.of_checkpoint(checkpoint)
        if self.spec.checkpoints.loads_optimizer:
            self.backend.load_state(checkpoint)
        self.report.health.load_state_dict(state.health)
        self.evaluation.load_state_dict(state.parts["evaluation"])
        self.checkpointing.frequency.load_state_dict(state.parts["checkpoints"])
        self.report.load_state_dict(state.parts["report"])
        if self.saver is not None:
            self.saver.load_state_dict(state.parts.get("saver", {}))
        self.load_part_states(state.parts, checkpoint)
        restore_rng(state.rng)
        self.logger.info("resumed from %s: %d steps are done", checkpoint, state.step)
        self.checkpointing.resume(checkpoint, state)
        self.report.rewind(state)
        self._restore_evaluation()

    def _rescue(self, error: BaseException) -> None:
        """After an error or a signal, save the completed steps before the run ends. A second signal skips this save."""
        if isinstance(error, KeyboardInterrupt):
            return
        if self._updating:
            newest = f"; {self.checkpointing.newest()}" if self.spec.checkpoints.enabled else ""
            self.logger.error("the run ended during an update, so the current step was not saved%s", newest)
            return
        if isinstance(error, StopRequested):
            self.logger.warning("received signal %s: stopping now; %d steps completed", error, self.state.step)
        if self._restoring:  # the models and optimizers may not belong to the step in ``state``
            return
        try:
            self.save_at_stop()
        except ArenoError as failure:
            self.logger.error("the last steps could not be saved: %s", failure)
