"""Reports the steps of ``areno run`` in ``main.log``, in ``metrics.jsonl`` and to tracking services."""

from collections.abc import Mapping
from logging import Logger
from typing import Any, ClassVar

from areno.config.experiment.experiments import BaseExperimentConfig
from areno.config.setting_names import SETTINGS
from areno.observability.display import LiveProgress
from areno.observability.health import HealthMonitor, gap_limit_of
from areno.observability.stats_collector import StatsTracker
from areno.observability.stats_logger import StatsLogger
from areno.storage.run_dir import RunDirectory
from areno.training.frequency import StepInfo
from areno.training.reporter import Reporter, StepOutcome
from areno.training.state import RunState

_SHOWN = {
    "entropy": "ppo_actor/update/entropy/avg",
    "truncated_ratio": "ppo_actor/no_eos_ratios/avg",
    "staleness_mean": "rollout/staleness/avg",
    "staleness_max": "rollout/staleness/max",
}
"""Maps short names, which only the terminal display uses, to the full names of the statistics that it shows."""


class ExperimentReporter(Reporter):
    """Reports to the log, to the metrics file and to tracking services.

    ``known_names`` maps the health monitor's names of statistics to the names of these statistics in this experiment.
    ``fp32`` is whether both rollout and training compute in fp32.
    """

    joins_evaluation: ClassVar[bool] = True

    def __init__(
        self,
        run_dir: RunDirectory,
        logger: Logger,
        config: BaseExperimentConfig,
        stats_logger: StatsLogger,
        tracker: StatsTracker,
        known_names: Mapping[str, str],
        fp32: bool,
    ) -> None:
        gconfig: Any = getattr(config, "gconfig", None)
        rollout: Any = getattr(config, "rollout", None)
        is_stale = rollout is not None and rollout.max_head_offpolicyness > 0
        health = HealthMonitor(
            logprob_gap_limit=gap_limit_of(fp32=fp32, stale=is_stale),
            grouped=gconfig is not None and gconfig.n_samples > 1,
            max_new_tokens=None if gconfig is None else gconfig.max_new_tokens,
            settings=SETTINGS,
        )
        kind = type(config).__name__.removesuffix("Config").lower()
        actor: Any = vars(config)["actor"]
        super().__init__(run_dir, logger, health, getattr(actor, "algorithm", "") or kind, actor.path)
        self._stats_logger, self._tracker, self._known_names = stats_logger, tracker, known_names

    def known_stats(self, outcome: StepOutcome) -> Mapping[str, float]:
        """Return the statistics that the health monitor uses."""
        return {known: outcome.stats[name] for known, name in self._known_names.items() if name in outcome.stats}

    def shown_stats(self, outcome: StepOutcome) -> Mapping[str, float]:
        """Return the statistics for the display, including the number of trained tokens per second."""
        stats = outcome.stats
        shown = {known: stats[name] for known, name in _SHOWN.items() if name in stats}
        tokens = next((value for name, value in stats.items() if name.endswith("/n_valid_tokens")), None)
        if tokens is not None and outcome.seconds > 0:
            shown["tokens_per_second"] = tokens / outcome.seconds
        return {**self.known_stats(outcome), **shown}

    def record_step(self, at: StepInfo, outcome: StepOutcome, state: RunState) -> None:
        """Record the statistics of ``outcome`` together with the statistics that the :class:`StatsTracker` has collected."""
        outcome.stats |= self._tracker.export() | outcome.memory
        self._stats_logger.commit(at.epoch, at.epoch_step, at.global_step, outcome.stats)

    def record_evaluation(self, state: RunState, metrics: Mapping[str, float], *, again: bool = False) -> None:
        """Record the metrics of an evaluation, with the number of the next step as the step number."""
        self._stats_logger.before_step(metrics, state.step)

    def show(self, step: int, outcome: StepOutcome) -> None:
        """Show the step if the output is a terminal. Otherwise do nothing, because the log shows the statistics."""
        if isinstance(self.display, LiveProgress):
            super().show(step, outcome)

    def rewind(self, state: RunState) -> None:
        """If the run starts at its first step, delete the records that earlier attempts wrote to the run's files.

        If the run resumes from a checkpoint, :meth:`load_state_dict` deletes the records of the steps after the checkpoint.
        """
        if state.step == 0:
            self._stats_logger.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the statistics logger."""
        return self._stats_logger.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the statistics logger, and drop the lines of later steps from the run's files."""
        self._stats_logger.load_state_dict(state)

    def close(self) -> None:
        """Close the display and the tracking services."""
        super().close()
        self._stats_logger.close()
