"""What ``areno run`` tells of its steps: a table in ``main.log``, ``metrics.jsonl``, and tracking services."""

from collections.abc import Mapping
from logging import Logger
from typing import Any, ClassVar

from areno.config.experiment.experiments import BaseExperimentConfig
from areno.observability.display import LiveProgress
from areno.observability.health import HealthMonitor
from areno.observability.stats_logger import StatsLogger
from areno.observability.tracker import StatsTracker
from areno.storage.run_dir import RunDirectory
from areno.training.frequency import StepInfo
from areno.training.report import Reporter, StepOutcome
from areno.training.state import RunState

_SETTINGS = {
    "--gradient-accumulation-steps": "actor.ppo_n_minibatches",
    "--max-context-len": "gconfig.max_tokens",
    "--max-prompt-tokens": "train_dataset.max_length",
    "--max-new-tokens": "gconfig.max_new_tokens",
    "--grad-clip-norm": "actor.optimizer.gradient_clipping",
    "--dtype float32": "actor.dtype=float32",
    "--temperature": "gconfig.temperature",
    "--n-samples": "gconfig.n_samples",
    "--reward-weights": "reward.weights",
    "--lr": "actor.optimizer.lr",
}
"""What the options of ``areno train`` are called in an experiment."""


class ExperimentReporter(Reporter):
    """See the module's text; ``known_names`` are statistics by the name that health monitor and display know."""

    joins_evaluation: ClassVar[bool] = True

    def __init__(
        self,
        run_dir: RunDirectory,
        logger: Logger,
        config: BaseExperimentConfig,
        stats_logger: StatsLogger,
        tracker: StatsTracker,
        known_names: Mapping[str, str],
    ) -> None:
        gconfig: Any = getattr(config, "gconfig", None)
        health = HealthMonitor(
            grouped=gconfig is not None and gconfig.n_samples > 1,
            max_new_tokens=None if gconfig is None else gconfig.max_new_tokens,
            settings=_SETTINGS,
        )
        super().__init__(run_dir, logger, health)
        self._stats_logger, self._tracker, self._known_names = stats_logger, tracker, known_names

    def known_stats(self, outcome: StepOutcome) -> Mapping[str, float]:
        """The few statistics that both know."""
        return {known: outcome.stats[name] for known, name in self._known_names.items() if name in outcome.stats}

    def record_step(self, at: StepInfo, outcome: StepOutcome, state: RunState) -> None:
        """Tell the numbers of a step, among them what the tracker has gathered."""
        outcome.stats |= self._tracker.export()
        self._stats_logger.commit(at.epoch, at.epoch_step, at.global_step, outcome.stats)

    def record_evaluation(self, state: RunState, metrics: Mapping[str, float], *, again: bool = False) -> None:
        """Tell what was measured before the next step."""
        self._stats_logger.before_step(metrics, state.step)

    def show(self, step: int, outcome: StepOutcome) -> None:
        """Only on a terminal: elsewhere the table tells it."""
        if isinstance(self.display, LiveProgress):
            super().show(step, outcome)

    def rewind(self, state: RunState) -> None:
        """Before the first step, drop what an attempt without a checkpoint wrote; else the state has said it."""
        if state.step == 0:
            self._stats_logger.reset()

    def state_dict(self) -> dict[str, Any]:
        """Axis and clock of the statistics."""
        return self._stats_logger.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from them; later lines are dropped."""
        self._stats_logger.load_state_dict(state)

    def close(self) -> None:
        """Close the services."""
        super().close()
        self._stats_logger.close()
