"""Writes the statistics of each step of ``areno run`` to ``metrics.jsonl``, to the log and to tracking services.

The log has a table per step. The heading of the table (``Epoch 1/5 step 6/19 global step 6``) counts steps from 1, whereas
files count steps from 0. The heading also has the duration of the step and the time since the start of the run. In a
recovered run, this time continues from its value at the checkpoint. A service that fails is disabled, because training must not
depend on an external server.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areno.observability.experiment_metrics import with_short_names
from areno.observability.stats_collector import without_counts
from areno.observability.tracking_services import ServiceGroup, TrackingService
from areno.storage.run_dir import RunDirectory

_log = logging.getLogger(__name__)

_MIN_WIDTH = 36


class StatsLogger:
    """Reports the statistics of an experiment. ``clock`` returns seconds."""

    def __init__(
        self,
        run_dir: RunDirectory,
        *,
        total_epochs: int,
        steps_per_epoch: int,
        services: Sequence[TrackingService] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = run_dir
        self.total_epochs = total_epochs
        self._steps_per_epoch = steps_per_epoch
        self._services = ServiceGroup(services, run_dir.metrics_path)
        self._clock = clock
        self._start = self._previous = clock()
        self._global_step = self._x = -1
        self._unsent: dict[str, float] = {}

    def before_step(self, stats: Mapping[str, float], step: int = 0) -> None:
        """Report statistics that were measured before a step, usually before the first step.

        The statistics are written to ``metrics.jsonl`` as a separate line with the step number ``step``. Tracking services
        receive them together with the statistics of the next finished step. If no step follows, the services receive them when
        the logger is closed. Raises ArenoError if the file cannot be written.
        """
        self._unsent = without_counts(stats)
        _log.info("statistics before %s\n%s", f"global step {step + 1}" if step else "training", table(self._unsent))
        self._run_dir.append_metrics(step, self._unsent)

    def commit(self, epoch: int, step: int, global_step: int, stats: Mapping[str, float]) -> None:
        """Report the statistics of a finished step, except counts (``...__count``). Raises ArenoError if writing fails."""
        numbers = with_short_names(without_counts(stats))
        now = self._clock()
        _log.info(
            "Epoch %d/%d step %d/%d global step %d (%.2f s, %.1f s since the start)\n%s",
            *(epoch + 1, self.total_epochs, step + 1, self._steps_per_epoch, global_step + 1),
            *(now - self._previous, now - self._start, table(numbers)),
        )
        self._previous = now
        self._run_dir.append_metrics(global_step, numbers)
        self._global_step = global_step
        self._x = max(global_step, self._x + 1)
        numbers = {**self._unsent, **numbers}
        self._unsent = {}
        self._services.log(self._x, numbers)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a recovered run restores."""
        return {"global_step": self._global_step, "x": self._x, "elapsed_s": self._clock() - self._start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last step of ``state``, and remove later lines from the files. Raises ArenoError on failure."""
        self._global_step, self._x = state["global_step"], state["x"]
        self._previous = self._clock()
        self._start = self._previous - state["elapsed_s"]
        dropped = self._run_dir.truncate_after(self._global_step)
        if dropped:
            step = self._global_step + 1
            _log.info(
                "removed %d lines from the run's files, because the run repeats all steps after global step %d",
                dropped,
                step,
            )

    def reset(self) -> None:
        """Remove all lines that an earlier attempt of the run wrote to the run's files. Raises ArenoError on failure.

        Call this function if the earlier attempt ended before its first checkpoint.
        """
        dropped = self._run_dir.truncate_after(-1)
        if dropped:
            _log.info(
                "removed %d lines from the run's files: an earlier attempt ended before its first checkpoint", dropped
            )

    def close(self) -> None:
        """If no step followed the last :meth:`before_step`, send its statistics. Then close the tracking services.

        Further calls send nothing.
        """
        if self._unsent:
            self._services.log(max(self._x, 0), self._unsent)
            self._unsent = {}
        self._services.close()
        _log.info("the run has completed %d steps in %.1f s", self._global_step + 1, self._clock() - self._start)


def table(numbers: Mapping[str, float]) -> str:
    """Format one line per number, sorted by name, with aligned values."""
    width = max([_MIN_WIDTH, *map(len, numbers)]) + 3
    return "\n".join(f"  {name + ' ':.<{width}} {_format(numbers[name])}" for name in sorted(numbers))


def _format(value: float) -> str:
    return str(value) if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15) else f"{value:.6g}"
