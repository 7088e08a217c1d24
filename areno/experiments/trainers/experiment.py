"""The base class of the trainers of ``areno run`` opens the run directory, the log, the tracking services and the engine.

Subclasses define a step (:meth:`ExperimentTrainer.run_step`) and the measurements of an evaluation. The loop is in
:class:`areno.training.loop.TrainingLoop`.
"""

import logging
import os
import random
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from areno.config.experiment.experiments import BaseExperimentConfig
from areno.config.experiment.loader import settled
from areno.config.experiment.machine import resolve_for_machine
from areno.config.experiment.notices import notice
from areno.config.experiment.path_checks import DATASETS, data_problems, held_out_is_trained
from areno.config.experiment.roles import server_of
from areno.config.experiment.run_sections import LOADER, SAVES_NOTHING, FrequencyConfig
from areno.config.experiment.saving import config_text, public_dict
from areno.config.parser import Problems
from areno.engine.backend import ACTOR, Backend
from areno.engine.rollout.counter_rng import derive_seed
from areno.errors import DataError
from areno.experiments.cluster import open_launcher
from areno.experiments.folders import ExperimentFolders, open_log
from areno.experiments.trainers.engines import (
    engine_config,
    family_problems,
    machine_of,
    make_engine,
    schedule_of,
    training_layout,
)
from areno.experiments.trainers.experiment_reporter import ExperimentReporter
from areno.experiments.trainers.row_source import RowSource, load_dataset
from areno.observability import tracing
from areno.observability.data_size import data_size
from areno.observability.memory_profiler import MemoryProfiler
from areno.observability.stats_collector import StatsTracker, get
from areno.observability.stats_logger import StatsLogger
from areno.observability.tracking_services import RunName, TrackingService, open_services
from areno.spec import CheckpointSpec, Frequency, RunSpec, Span
from areno.storage.run_layout import ACTOR_MODELS
from areno.training.checkpoints import Checkpoints
from areno.training.frequency import StepInfo
from areno.training.loop import PlannedStep, TrainingLoop
from areno.training.objectives.base import Needs, row_problem
from areno.training.saving import DISK_REMEDY, Saver

_log = logging.getLogger(__name__)

_KEPT_CHECKPOINTS = 2


def frequency(section: FrequencyConfig, *, first: bool = False, last: bool = False) -> Frequency:
    """Convert the ``freq_*`` settings of a section to a schedule of evaluations, checkpoints or saved models.

    :class:`Frequency` explains ``first`` and ``last``.
    """
    return Frequency(section.freq_epochs, section.freq_steps, section.freq_secs, first, last)


class ExperimentTrainer(TrainingLoop):
    """Base class of the trainers, for use as a context manager.

    If ``train_dataset`` is None, the dataset of the configuration section ``train_dataset`` is loaded. The same holds for
    ``valid_dataset``.
    """

    saver: Saver
    actor_trains: ClassVar[str] = "policy"
    needs: Needs | None = None
    """Required contents of a dataset row: a prompt, a prompt with a response, or a pair. None if the workflow defines them."""
    section: ClassVar[str] = "ppo_actor"
    """Prefix of the names of training statistics, such as ``ppo_actor`` in ``ppo_actor/update/grad_norm``."""
    logger = _log
    best_may_be_missing = True

    def __init__(
        self,
        config: BaseExperimentConfig,
        train_dataset: Sequence[Mapping[str, Any]] | None = None,
        valid_dataset: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        config = settled(config)
        self.config: Any = config
        self.folders = ExperimentFolders.of(config)
        self._closing = ExitStack()
        self.run_dir = self._closing.enter_context(open_log(config))
        self._closed = False
        self._services: list[TrackingService] = []
        try:
            self._set_environment()
            accepted = notice(config)
            self.machine = machine_of(config)
            resolved = resolve_for_machine(config, self.machine)
            self.run_dir.write_config(config_text(config))
            for line in (accepted, *resolved) if accepted else resolved:
                _log.info("%s", line)
            self._seed()
            self.tracker: StatsTracker = get("")
            self._configure_tracing()
            self.memory = self._memory_profiler()
            spec = self._spec()
            checkpoints = Checkpoints(spec.checkpoints)
            self.resumed_from = self.find_checkpoint(checkpoints)
            datasets = self._read_rows(train_dataset, valid_dataset)
            self._check_rows(*datasets)
            self._services = self._open_services()
            self.launcher = open_launcher(config, self.machine)
            if self.launcher is not None:
                self._closing.callback(self.launcher.close)
            self.engine: Backend = self._make_engine(self.resumed_from)
            self.rows, self.eval_rows = self.make_rows(*datasets)
            self._data_size = data_size(*datasets, self.rows.steps_per_epoch)
            self.saver = self._make_saver()
            self.set_up(spec, self.engine, self._make_reporter(), checkpoints)
        except BaseException as error:
            self.close(error)
            raise

    def find_checkpoint(self, checkpoints: Checkpoints) -> Path | None:
        """Return the checkpoint to resume from; None if the run starts at the first step."""
        return checkpoints.find()

    @abstractmethod
    def make_rows(self, train: Sequence[Any], valid: Sequence[Any] | None) -> tuple[RowSource, Sequence[Any] | None]:
        """Return the training rows and the evaluation rows."""

    def known_names(self) -> dict[str, str]:
        """Return the full name of the statistic for each short name that the health monitor and the display use."""
        return {name: f"{self.section}/{name}" for name in ("loss", "grad_norm", "update_skipped", "loss_scale")}

    def _set_environment(self) -> None:
        """Apply the actor's ``scheduling_spec`` to this process. Ranks inherit the environment variables."""
        spec = self.config.actor.scheduling_spec[0]
        variables = spec.environment()
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        self._closing.callback(_restore, before)
        if spec.cpu is not None:
            torch.set_num_threads(spec.cpu)

    def _seed(self) -> None:
        seed = derive_seed(self.config.seed, 0, 0) % 2**32
        random.seed(seed)
        torch.manual_seed(seed)

    def _read_rows(
        self, train: Sequence[Any] | None, valid: Sequence[Any] | None
    ) -> tuple[Sequence[Any], Sequence[Any] | None]:
        """Return the training and the evaluation dataset. Load each dataset that was not passed.

        Data is loaded before a model, because data errors are frequent.
        """
        config, passed = self.config, {"train_dataset": train, "valid_dataset": valid}
        Problems.raise_all(data_problems(config, tuple(name for name in DATASETS if passed[name] is None)))
        if train is None and valid is None and held_out_is_trained(config):
            _log.warning(
                "valid_dataset overlaps train_dataset, so the evaluation uses rows that the model is trained on"
            )
        train = load_dataset(config.train_dataset, "train_dataset") if train is None else train
        if valid is None and config.valid_dataset is not None:
            valid = load_dataset(config.valid_dataset, "valid_dataset")
        return train, valid

    def _check_rows(self, train: Sequence[Any], valid: Sequence[Any] | None) -> None:
        for name, rows in (("train_dataset", train), ("valid_dataset", valid)):
            if rows:
                self.check_first_row(self.config, name, rows)

    @classmethod
    def check_first_row(cls, config: Any, name: str, rows: Sequence[Any]) -> None:
        """Raise :class:`DataError` if the first row of the dataset ``name`` lacks a value that the experiment needs."""
        section, loader = getattr(config, name) or config.train_dataset, f"{name}.dataset_kwargs.{LOADER}"
        if cls.needs and (problem := row_problem(cls.needs, rows[0], f"{name} {section.path}", loader)):
            raise DataError(problem)

    def _open_services(self) -> list[TrackingService]:
        """Open the tracking services, before a model is loaded, so that a missing login to a service is reported early."""
        loggers = self.config.stats_logger
        return open_services(
            RunName(self.config.experiment_name, self.config.trial_name, public_dict(self.config)),
            self.run_dir.path,
            wandb=asdict(loggers.wandb),
            swanlab=asdict(loggers.swanlab),
            tensorboard={"path": loggers.tensorboard.path or str(self.run_dir.events_path)},
            trackio=asdict(loggers.trackio),
            mlflow=asdict(loggers.mlflow),
        )

    def _make_engine(self, checkpoint: Path | None) -> Backend:
        """Open the engine with the weights of the checkpoint or, without a checkpoint, of the model."""
        Problems.raise_all(family_problems(self.config))
        section = self.config.actor
        options = {"gpu": self.machine.gpus > 0, **self._engine_options()}
        config = engine_config(section, trains=self.actor_trains, seed=self.config.seed, **options)
        layout = training_layout(section)
        if checkpoint is not None and config.adapter is not None:
            config = replace(config, adapter=replace(config.adapter, adapter_path=str(checkpoint)))
        elif checkpoint is not None:
            section = replace(section, path=str(checkpoint))
        return make_engine(section, config, layout, self.launcher)

    def _engine_options(self) -> dict[str, Any]:
        return {}

    def _spec(self) -> RunSpec:
        config, recover = self.config, self.config.recover
        every = frequency(recover, last=frequency(recover).given)
        return RunSpec(
            span=Span(config.total_train_steps, config.total_train_n_seqs),
            evaluation=frequency(config.evaluator, first=config.evaluator.eval_before_train),
            patience=config.evaluator.early_stop_patience,
            evaluated_with={"valid_dataset": None if config.valid_dataset is None else config.valid_dataset.path},
            checkpoints=CheckpointSpec(
                ExperimentFolders.of(config, recover.fileroot).recover,
                every,
                newest=_KEPT_CHECKPOINTS,
                best=config.evaluator.keep_best,
                enabled=recover.enabled,
                saves_optimizer=not recover.no_save_optim,
                loads_optimizer=not (recover.no_load_optim or recover.no_save_optim),
                strict=True,
                remedy=DISK_REMEDY.replace("saver.", "recover."),
            ),
        )

    def _configure_tracing(self) -> None:
        section, perf, session = self.config.perf_tracer, None, None
        if section is not None:
            perf = {name: getattr(section, name) for name in ("enabled", "save_interval", "profile_steps")}
            session = None if section.session_tracer is None else asdict(section.session_tracer)
        tracing.configure(self.run_dir.path, "trainer", perf=perf, session=session)

    def _memory_profiler(self) -> MemoryProfiler:
        section, gpu = self.config.memory_profiler, self.machine.gpus > 0
        if section is None:
            return MemoryProfiler(self.run_dir.path, ())
        return MemoryProfiler(self.run_dir.path, section.profile_steps, section.max_entries, gpu=gpu)

    def _make_saver(self) -> Saver:
        config, saves = self.config, self.config.saver.mode != SAVES_NOTHING
        if not saves:
            _log.warning("saver.mode=%s: no model is saved, not even the last model", SAVES_NOTHING)
        elif not frequency(config.saver).given:
            _log.warning("saver.freq_epochs, freq_steps and freq_secs are null: only the last model is saved")
        root, mode = ExperimentFolders.of(config, config.saver.fileroot).checkpoints, config.saver.mode
        return Saver(root, frequency(config.saver, last=saves), self.saved_roles, mode if saves else "auto")

    def _make_reporter(self) -> ExperimentReporter:
        config = self.config
        epochs, steps = config.total_train_epochs, self.rows.steps_per_epoch
        self.stats_logger = StatsLogger(
            self.run_dir, total_epochs=epochs, steps_per_epoch=steps, services=self._services
        )
        fp32 = self.engine.config.compute_dtype == "float32" and not server_of(config)
        return ExperimentReporter(self.run_dir, _log, config, self.stats_logger, self.tracker, self.known_names(), fp32)

    def plan_steps(self, total_epochs: int | None = None) -> None:
        """Compute the number of steps and the learning-rate schedule. ``total_epochs`` replaces ``total_train_epochs``."""
        config, per_epoch = self.config, self.rows.steps_per_epoch
        if total_epochs is not None:
            config.total_train_epochs = self.stats_logger.total_epochs = total_epochs
        steps = config.total_train_epochs * per_epoch
        self._total_steps = min(steps, config.total_train_steps or steps)
        self.schedule = schedule_of(config.actor.optimizer, self._total_steps)

    def total_steps(self) -> int:
        """Return the number of steps that :meth:`plan_steps` has computed."""
        return self._total_steps

    def data_size(self) -> dict[str, int]:
        """Return the sizes of the datasets."""
        return self._data_size

    def steps(self) -> Iterator[PlannedStep]:
        """Yield the steps in order. The batch of a step is only a :class:`StepInfo`, without rows.

        :meth:`run_step` reads the rows itself, because a rollout that runs ahead also needs the rows of later steps.
        """
        state = self.state
        at = StepInfo(state.epoch, state.epoch_step, state.step, self.rows.steps_per_epoch, self._total_steps)
        if at.epoch_step >= at.steps_per_epoch:
            at = replace(at, epoch=at.epoch + 1, epoch_step=0)
        while at.global_step < self._total_steps and not self.finished():
            yield PlannedStep(at, at)
            at = at.next()

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        """Trace a step and, if ``memory_profiler`` selects the step, record memory snapshots."""
        with super().around_step(step), self.memory.step(step, self.engine.run_on_all_ranks):
            yield

    def end(self) -> None:
        """Save the trained models, if the last step has not saved them, and write the summary."""
        self._save_last_models()
        summary = {"global_step": self.state.step, "sequences": self.state.sequences, "finished": True}
        self.run_dir.write_summary({**summary, "best_evaluation": self.state.best})

    @contextmanager
    def timed(self, key: str) -> Iterator[None]:
        """Record the duration of a block as the statistic ``timeperf/{key}`` and as a trace event."""
        with self.tracker.record_timing(key), tracing.trace_scope(key):
            yield

    def optimize(
        self, rows: Sequence[Any], loss: Any, batching: Any, rate: float, role: str = ACTOR
    ) -> dict[str, float]:
        """Take one optimizer step on ``rows`` with the learning rate ``rate``, and return the statistics of the step."""
        self._updating = True
        self.engine.set_learning_rate(role, rate)
        return self.engine.train(rows, loss, batching, None, role)

    def part_states(self) -> dict[str, Any]:
        """Return the position in the training data, to be saved in a checkpoint."""
        return {"rows": self.rows.state_dict()}

    def load_part_states(self, parts: dict[str, Any], checkpoint: Path) -> None:
        """Restore the position in the training data from a checkpoint."""
        self.rows.load_state_dict(parts["rows"])

    def start_fresh(self) -> None:
        """Start without a checkpoint: delete the records that earlier attempts at this run wrote to its files."""
        if self.spec.checkpoints.enabled:
            _log.info("no checkpoint in %s; starting at the first step", self.spec.checkpoints.folder)
        self.report.rewind(self.state)

    def save_at_stop(self) -> None:
        """Write a checkpoint or, if checkpoints are disabled, save the models."""
        if self.spec.checkpoints.enabled:
            self.checkpoint()
        else:
            self._save_last_models()

    def _save_last_models(self) -> None:
        """Wait until pending saves are finished, and then save the models of the last step.

        The models are not saved if they are already saved, or if ``saver.mode`` is ``off``.
        """
        self.saver.wait()
        state = self.state
        at = StepInfo(state.epoch, state.epoch_step - 1, state.step - 1, self.rows.steps_per_epoch, state.step)
        saves = self.config.saver.mode != SAVES_NOTHING
        if state.step and saves and not self.saver.path(ACTOR_MODELS, at).exists():
            self.save_models(at)

    def close(self, error: BaseException | None = None) -> None:
        """Close everything that the trainer opened, and record how the run ended. A second call does nothing.

        ``error`` is the cause of a failure; None after a run without a failure.
        """
        if self._closed:
            return
        self._closed = True
        parts = [getattr(self, name, None) for name in ("saver", "engine", "report")]
        if parts[-1] is None:
            parts += self._services
        with ExitStack() as stack:  # closes everything, in reverse order, even if something fails
            stack.push(lambda _kind, closing, _trace: self._end_log(error or closing))
            stack.callback(tracing.session_tracer().close)
            stack.callback(tracing.save, force=True)
            for part in reversed(parts):
                if part is not None:
                    stack.callback(part.close)

    def _end_log(self, error: BaseException | None) -> None:
        """Close the log, and record in the run's status how the run ended."""
        self._closing.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
            _log.error("the experiment failed: %s: %s", type(error).__name__, error)
        try:
            self.close(error)
        except Exception as closing:
            if error is None:
                raise
            _log.error("closing the experiment failed too: %s: %s", type(closing).__name__, closing)


def _restore(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def in_scope(section: str, numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the statistics with the prefix ``{section}/`` added to their names."""
    return {f"{section}/{name}": value for name, value in numbers.items()}
