"""The frame of every experiment: folders, log, engine, steps, models to keep, restart points, statistics.

A trainer says what a step does (:meth:`ExperimentTrainer.run_step`) and what an evaluation measures. After each step come,
in this order: models that are due, the evaluation, the statistics, the restart point. The restart point is last, so a run
that goes on from it has told everything before it once.
"""

from __future__ import annotations

import functools
import logging
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import torch

from areno.api.row_checks import Needs, row_problem
from areno.config.experiment.experiments import BaseExperimentConfig
from areno.config.experiment.idle_checks import LOADER
from areno.config.experiment.loader import settled
from areno.config.experiment.machine import resolve_for_machine
from areno.config.experiment.notices import notice
from areno.config.experiment.places import DATASETS, data_problems, held_out_is_trained
from areno.config.experiment.run_sections import SAVES_NOTHING, FrequencyConfig
from areno.config.experiment.saving import config_text, public_dict
from areno.config.experiment.update_sections import MicroBatchSpec
from areno.config.parser import Problems
from areno.engine.engine import ACTOR, Engine
from areno.engine.parallel.group import AnyEngine
from areno.engine.rollout.counter_rng import derive_seed
from areno.errors import DataError, UsageError
from areno.experiments.folders import ExperimentFolders, open_log
from areno.experiments.frequency import FrequencyControl, StepInfo
from areno.experiments.recovery import Recovery, RecoveryPoint
from areno.experiments.saving import Saver
from areno.experiments.trainers.engines import (
    engine_config,
    layout_of,
    make_engine,
    rows_per_pass,
    schedule_of,
    this_machine,
)
from areno.experiments.trainers.rows import RowSource, load_dataset
from areno.observability import tracing
from areno.observability.memory_profiler import MemoryProfiler
from areno.observability.services import RunName, Service, open_services
from areno.observability.stats_logger import StatsLogger
from areno.observability.tracker import StatsTracker, get
from areno.types import TrainSequence

_log = logging.getLogger(__name__)

DEFAULT = "default"
"""Folder of the actor's models."""


class ExperimentTrainer(ABC):
    """See the module's text; to be used as a context manager, or closed.

    Args:
        config: of the experiment.
        train_dataset: rows, indexable; None loads ``train_dataset`` of the configuration.
        valid_dataset: held-out rows; None loads ``valid_dataset``, where there is one.

    Raises:
        UsageError: the configuration asks for what is not there.
    """

    roles: Sequence[str] = (DEFAULT,)
    """Models that are saved; the first is the actor."""
    actor_trains: ClassVar[str] = "policy"
    needs: Needs | None = None
    """What a row must have; None where that is the workflow's matter."""
    section: ClassVar[str] = "ppo_actor"
    """What statistics of the update are called."""

    def __init__(
        self,
        config: BaseExperimentConfig,
        train_dataset: Sequence[Mapping[str, Any]] | None = None,
        valid_dataset: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        config = settled(config)
        self.config: Any = config
        self.folders = ExperimentFolders(config.cluster.fileroot, config.experiment_name, config.trial_name)
        self._closing = ExitStack()
        self.run_dir = self._closing.enter_context(open_log(config))
        self._closed = False
        self._services: list[Service] = []
        try:
            self._set_environment()
            accepted = notice(config)
            resolved = resolve_for_machine(config, this_machine())
            self.run_dir.write_config(config_text(config))
            for line in (accepted, *resolved) if accepted else resolved:
                _log.info("%s", line)
            self._seed()
            self.tracker: StatsTracker = get("")
            self._configure_tracing()
            self.memory = self._memory_profiler()
            self.recovery = Recovery(
                self._elsewhere(config.recover, self.folders.checkpoints) / "recover",
                config.recover.mode,
                frequency(config.recover, always_last=frequency(config.recover).enabled),
            )
            self._point = self.recovery.load()
            found = self._read_rows(train_dataset, valid_dataset)
            self._check_rows(*found)
            self._services = self._open_services()
            self.engine: AnyEngine = self._make_engine(self._point)
            self.rows, self.valid_rows = self.make_rows(*found)
            self._make_keepers()
        except BaseException:
            self.close()
            raise

    # -- what a trainer supplies -----------------------------------------------------------------------------------

    @abstractmethod
    def make_rows(self, train: Sequence[Any], valid: Sequence[Any] | None) -> tuple[RowSource, Sequence[Any] | None]:
        """The rows to train on, and those to evaluate on."""

    @abstractmethod
    def run_step(self, at: StepInfo) -> dict[str, float]:
        """Do one step; returns its statistics."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Measure the model on the held-out rows."""

    def sequences_of(self, numbers: Mapping[str, float]) -> float:
        """Sequences that a step has trained on, from its statistics."""
        return numbers.get(f"{self.section}/n_seqs", float(self.rows.batch_size))

    def states(self) -> dict[str, Any]:
        """Further counters of a restart point, as JSON has them."""
        return {}

    def rollout_state(self) -> Any:
        """Further state of a restart point."""
        return None

    def restore(self, point: RecoveryPoint) -> None:  # noqa: B027  (most have nothing more)
        """Go on from :meth:`states` and :meth:`rollout_state`; the engine has its weights already."""

    # -- making ----------------------------------------------------------------------------------------------------

    def _set_environment(self) -> None:
        """Set what was given for the process that trains: variables, which its ranks inherit, and threads of PyTorch."""
        spec = self.config.actor.scheduling_spec[0]
        wanted = spec.environment()
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
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
        """The rows that were not given; read before a model is loaded, because data is wrong more often.

        Raises:
            UsageError: a section names no rows, or the rows to evaluate on are those to train on.
        """
        config, given = self.config, {"train_dataset": train, "valid_dataset": valid}
        problems = Problems()
        for text in data_problems(config, tuple(name for name in DATASETS if given[name] is None)):
            problems.add(text)
        problems.raise_if_any()
        if train is None and valid is None and held_out_is_trained(config):
            _log.warning("valid_dataset names rows of train_dataset: the evaluation measures rows that are trained on")
        train = load_dataset(config.train_dataset, "train_dataset") if train is None else train
        if valid is None and config.valid_dataset is not None:
            valid = load_dataset(config.valid_dataset, "valid_dataset")
        return train, valid

    def _check_rows(self, train: Sequence[Any], valid: Sequence[Any] | None) -> None:
        """Look at the first row of each data set.

        Raises:
            DataError: it lacks what the experiment needs.
        """
        for name, rows in (("train_dataset", train), ("valid_dataset", valid)):
            if self.needs is not None and rows:
                section = getattr(self.config, name) or self.config.train_dataset
                loader = f"{name}.dataset_kwargs.{LOADER}"
                if problem := row_problem(self.needs, rows[0], f"{name} {section.path}", loader):
                    raise DataError(problem)

    def _open_services(self) -> list[Service]:
        """Before a model is loaded: a login may be missing."""
        loggers = self.config.stats_logger
        return open_services(
            RunName(self.config.experiment_name, self.config.trial_name, public_dict(self.config)),
            self.run_dir.path,
            wandb=asdict(loggers.wandb),
            swanlab=asdict(loggers.swanlab),
            tensorboard={"path": loggers.tensorboard.path or str(self.run_dir.events_path)},
            trackio=asdict(loggers.trackio),
        )

    def _make_engine(self, point: RecoveryPoint | None) -> AnyEngine:
        """The engine, with the weights of a restart point where there is one."""
        actor = self.config.actor
        section = actor if point is None else replace(actor, init_from_scratch=False)
        config = engine_config(section, trains=self.actor_trains, seed=self.config.seed)
        if point is not None and config.adapter is not None:
            config = replace(config, adapter=replace(config.adapter, adapter_path=str(point.trainer)))
        elif point is not None:
            section = replace(section, path=str(point.trainer))
        return make_engine(section, config, layout_of(actor.backend, "actor"))

    def _configure_tracing(self) -> None:
        given, perf, session = self.config.perf_tracer, None, None
        if given is not None:
            perf = {name: getattr(given, name) for name in ("enabled", "save_interval", "profile_steps")}
            session = None if given.session_tracer is None else asdict(given.session_tracer)
        tracing.configure(self.run_dir.path, "trainer", perf=perf, session=session)

    def _memory_profiler(self) -> MemoryProfiler:
        given = self.config.memory_profiler
        if given is None:
            return MemoryProfiler(self.run_dir.path, ())
        return MemoryProfiler(self.run_dir.path, given.profile_steps, given.max_entries)

    def _make_keepers(self) -> None:
        config, folders = self.config, self.folders
        saves = config.saver.mode != SAVES_NOTHING
        self.saver = Saver(
            self._elsewhere(config.saver, folders.checkpoints),
            lambda: frequency(config.saver, always_last=saves),
            self.roles,
            config.saver.mode if saves else "auto",
        )
        if not saves:
            _log.warning("no model will be saved, not even the last one: saver.mode is %s", SAVES_NOTHING)
        elif not frequency(config.saver).enabled:
            _log.warning("only the last model will be saved: saver.freq_epochs, freq_steps and freq_secs are null")
        self.evaluator = frequency(config.evaluator, before_training=config.evaluator.eval_before_train)
        self.stats_logger = StatsLogger(
            self.run_dir,
            total_epochs=config.total_train_epochs,
            steps_per_epoch=self.rows.steps_per_epoch,
            services=self._services,
        )

    def plan_steps(self, total_epochs: int | None = None) -> None:
        """How many steps there will be; ``total_epochs`` is in place of ``total_train_epochs``."""
        config, per_epoch = self.config, self.rows.steps_per_epoch
        if total_epochs is not None:
            config.total_train_epochs = self.stats_logger.total_epochs = total_epochs
        steps = config.total_train_epochs * per_epoch
        self.total_steps = min(steps, config.total_train_steps or steps)
        self.at = StepInfo.first(per_epoch, self.total_steps)
        self.schedule = schedule_of(config.actor.optimizer, self.total_steps)

    def _elsewhere(self, section: FrequencyConfig, usual: Path) -> Path:
        """Checkpoints may lie under a root of their own."""
        if section.fileroot in ("", self.config.cluster.fileroot):
            return usual
        names = self.config.experiment_name, self.config.trial_name
        return ExperimentFolders(section.fileroot, *names).checkpoints

    # -- running ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All steps, from the first or from a restart point."""
        trained = self._recover()
        limit = self.config.total_train_n_seqs
        if self.evaluator.due_before_training():
            self.stats_logger.before_training(self._evaluated())
        while self.at.global_step < self.total_steps and (limit is None or trained < limit):
            step = self.at.global_step
            with tracing.perf_tracer().step(step), self.memory.step(step):
                trained += self._step(limit, trained)
            tracing.save(step)
            self.at = self.at.next()
        self.saver.wait()
        self.run_dir.write_summary({"global_step": self.at.global_step, "sequences": trained, "finished": True})

    def _step(self, limit: int | None, trained: float) -> float:
        at = self.at
        with self.timed("step"):
            numbers = self.run_step(at)
        sequences = self.sequences_of(numbers)
        if limit is not None and trained + sequences >= limit:
            self.at = at = StepInfo(at.epoch, at.epoch_step, at.global_step, at.steps_per_epoch, at.global_step + 1)
        with self.timed("save"):
            self._save(at)
        if self.valid_rows is not None and self.evaluator.check(at):
            numbers |= self._evaluated()
        numbers |= self.tracker.export()
        self.stats_logger.commit(at.epoch, at.epoch_step, at.global_step, numbers)
        if at.is_last:
            self.saver.wait()  # a restart point that says all is done comes after what it says
        with self.timed("checkpoint_for_recover"):
            self.recovery.dump_if_due(
                at,
                states=lambda: self._states(trained + sequences),
                write_trainer=self._write_trainer,
                rollout_state=self.rollout_state,
                needed_bytes=self.engine.checkpoint_bytes,
            )
        return sequences

    def _evaluated(self) -> dict[str, float]:
        with self.timed("eval"):
            return self.evaluate()

    def timed(self, key: str) -> Any:
        """A block whose seconds become ``timeperf/{key}``, and an event of the trace."""
        return _Timed(self, key)

    def optimize(
        self, rows: Sequence[Any], loss: Any, batching: Any, rate: float, role: str = ACTOR
    ) -> dict[str, float]:
        """One optimizer step over rows, at a rate."""
        self.engine.set_learning_rate(role, rate)
        return self.engine.train(rows, loss, batching, None, role)

    def score(
        self, rows: Sequence[TrainSequence], role: str, column: str, spec: MicroBatchSpec, key: str | None = None
    ) -> None:
        """Give each row the log-probs of a role.

        Args:
            rows: scored at their own temperatures.
            role: scores.
            column: of the rows.
            spec: how many rows the model takes at once.
            key: of the time that it takes; None is ``{role}_logp``.
        """
        tokens, warmth = [row.tokens for row in rows], [row.temperature for row in rows]
        with self.timed(key or f"{role}_logp"):
            found = self.engine.score_logprobs(role, tokens, warmth, rows_per_pass(spec, tokens))
        for row, logprobs in zip(rows, found, strict=True):
            setattr(row, column, logprobs)

    # -- keeping ---------------------------------------------------------------------------------------------------

    def _save(self, at: StepInfo) -> None:
        for role in self.roles:
            name = ACTOR if role == DEFAULT else role
            self.saver.save_if_due(
                role, at, functools.partial(self.engine.save_model, role=name), stage=self._stage(name)
            )

    def _stage(self, role: str) -> Callable[[], Any] | None:
        """What copies a model, for saving beside training; None where it cannot be copied."""
        engine = self.engine
        if not isinstance(engine, Engine) or engine.role(role).model.adapter is not None:
            return None
        return lambda: engine.role(role).stage_model(engine.tokenizer)

    def _write_trainer(self, folder: Path) -> None:
        self.engine.save_model(folder)
        if not self.config.recover.no_save_optim:
            self.engine.save_state(folder)

    def _states(self, trained: float) -> dict[str, Any]:
        return {
            "saver": self.saver.state_dict(),
            "evaluator": self.evaluator.state_dict(),
            "stats_logger": self.stats_logger.state_dict(),
            "rows": self.rows.state_dict(),
            "trained": trained,
            **self.states(),
        }

    def _recover(self) -> float:
        """Go on from the restart point, if there is one; returns the sequences trained on so far.

        The engine has its weights already, and the roles are there.
        """
        point = self._point
        if point is None:
            self._begin_anew()
            return 0.0
        if not (self.config.recover.no_load_optim or self.config.recover.no_save_optim):
            self.engine.load_state(point.trainer)
        self.saver.load_state_dict(point.states["saver"])
        self.evaluator.load_state_dict(point.states["evaluator"])
        self.stats_logger.load_state_dict(point.states["stats_logger"])
        self.rows.load_state_dict(point.states["rows"])
        done = point.step
        self.at = StepInfo(
            done.epoch, done.epoch_step, done.global_step, self.rows.steps_per_epoch, self.total_steps
        ).next()
        self.restore(point)
        point.restore_rng()
        return float(point.states["trained"])

    def _begin_anew(self) -> None:
        """Refuse to write over a trial that has run; what an attempt without a restart point has left is dropped.

        Raises:
            UsageError: the trial has run, and nothing says that it goes on.
        """
        if self.run_dir.read_metrics() and not self.recovery.enabled:
            names = f"{self.config.experiment_name}/{self.config.trial_name}"
            raise UsageError(
                f"trial_name {self.config.trial_name!r}: {names} has run already, in {self.run_dir.path}; choose another "
                "trial_name, or set recover.mode=auto to go on with it"
            )
        self.stats_logger.begin_anew()

    def ensure_roles(self) -> None:  # noqa: B027  (most have the actor alone)
        """Load the models that score besides the actor."""

    # -- ending ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End everything that was started; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for part in (getattr(self, name, None) for name in ("saver", "engine", "stats_logger")):
            if part is not None:
                part.close()
        if getattr(self, "stats_logger", None) is None:
            for service in self._services:
                service.close()
        tracing.save(force=True)
        tracing.session_tracer().close()
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
            _log.error("the experiment has failed: %s: %s", type(error).__name__, error)
        self.close()


class _Timed:
    """Statistics and trace of one block."""

    def __init__(self, trainer: ExperimentTrainer, key: str) -> None:
        self._timing, self._scope = trainer.tracker.record_timing(key), tracing.trace_scope(key)

    def __enter__(self) -> None:
        self._timing.__enter__()
        self._scope.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._scope.__exit__(*raised)
        self._timing.__exit__(*raised)


def _restore(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def frequency(section: FrequencyConfig, **more: Any) -> FrequencyControl:
    """The rhythm of a section."""
    return FrequencyControl(section.freq_epochs, section.freq_steps, section.freq_secs, **more)


def in_scope(section: str, numbers: Mapping[str, float]) -> dict[str, float]:
    """Statistics under a section's name."""
    return {f"{section}/{name}": value for name, value in numbers.items()}


def averaged(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Statistics of several optimizer steps as those of one update: least of ``/min``, greatest of ``/max``, else means."""
    names = list(dict.fromkeys(name for part in parts for name in part))
    merged = {}
    for name in names:
        values = [part[name] for part in parts if name in part]
        kind = name.rpartition("/")[2]
        merged[name] = min(values) if kind == "min" else max(values) if kind == "max" else sum(values) / len(values)
    return merged
