"""Writes log lines, ``metrics.jsonl`` and TensorBoard events during ``areno train``."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from logging import Logger
from pathlib import Path
from typing import Any, ClassVar

from areno.config.all_train_options import TrainOptions
from areno.config.secrets import without_secrets
from areno.config.tracking import mode_of
from areno.config.yaml_io import dump_config
from areno.observability import log_lines
from areno.observability.health import HealthMonitor
from areno.observability.scalars import step_scalars
from areno.observability.tensorboard import EventWriter
from areno.observability.tracking_services import RunName, ServiceGroup, open_services
from areno.storage.run_dir import RunDirectory
from areno.training.frequency import StepInfo
from areno.training.reporter import Reporter, StepOutcome
from areno.training.state import RunState


class StepReporter(Reporter):
    """Writes log lines, ``metrics.jsonl`` and TensorBoard events, and reports to tracking services."""

    joins_evaluation: ClassVar[bool] = False

    def __init__(self, config: TrainOptions, logger: Logger, health: HealthMonitor) -> None:
        super().__init__(RunDirectory(config.run_path), logger, health, config.algo, str(config.ckpt))
        self._config = config
        self._sinks: Sequence[EventWriter | ServiceGroup] = ()

    def begin(self, total_steps: int, done_steps: int, data: Mapping[str, int]) -> None:
        """Display the start of the run, write the configuration, and open the tracking services."""
        self.run_dir.write_config(dump_config(self._config))
        self._opened(done_steps)
        super().begin(total_steps, done_steps, data)

    def record_step(self, at: StepInfo, outcome: StepOutcome, state: RunState) -> None:
        """Log the statistics and write all scalars."""
        outcome.stats["step_wall_time_s"] = outcome.seconds
        log_lines.train_stats(self.logger, at.epoch, at.global_step, outcome.stats)
        scalars = step_scalars(
            rows=outcome.rows,
            train_stats=outcome.stats,
            timings=outcome.timings,
            skipped_long=outcome.skipped_long,
            total_skipped_long=state.skipped_long,
            rewards=outcome.rewards,
        )
        self._record(at.global_step, scalars | outcome.memory)

    def record_evaluation(self, state: RunState, metrics: Mapping[str, float], *, again: bool = False) -> None:
        """Log the metrics of an evaluation, and record each metric with ``eval/`` in front of its name."""
        if not again:
            log_lines.evaluation(self.logger, state.epoch, state.step, metrics)
        self._record(state.step, {f"eval/{name}": value for name, value in metrics.items()})

    def rewind(self, state: RunState) -> None:
        """Keep the records of the first ``state.step`` steps, which are completed, and delete the records of later steps."""
        self.run_dir.truncate_after(state.step - 1)

    @contextmanager
    def writing(self, path: Path, state: RunState) -> Iterator[None]:
        """Display and log the writing of a checkpoint."""
        self.display.phase("save")
        log_lines.save_checkpoint_start(self.logger, state.epoch, state.step - 1, path)
        yield
        log_lines.save_checkpoint_end(self.logger, state.epoch, state.step - 1, path)

    def close(self) -> None:
        """Flush records and events, and close the tracking services."""
        super().close()
        for sink in reversed(self._sinks):
            sink.close()

    def _record(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write metrics to ``metrics.jsonl``, TensorBoard and the tracking services.

        The keys of ``scalars`` are full metric names, such as ``eval/loss``. For an evaluation, ``step`` is the number of
        completed steps.
        """
        sinks = self._opened(step)
        self.run_dir.append_metrics(step, scalars)
        for sink in sinks:
            sink.log(step, scalars)

    def _opened(self, step: int) -> Sequence[EventWriter | ServiceGroup]:
        """Return the TensorBoard writer and the tracking services. The first call opens both of them.

        A resumed run replaces its TensorBoard events of ``step`` and later steps.
        """
        if not self._sinks:
            config = self._config
            name = RunName(config.track_project, self.run_dir.path.name, without_secrets(asdict(config)))
            sections: dict[str, Any] = {service: {"mode": mode_of(service)} for service in config.track}
            services = ServiceGroup(open_services(name, self.run_dir.path, **sections), self.run_dir.metrics_path)
            self._sinks = EventWriter(config.events_path, step if config.resume else None), services
        return self._sinks
