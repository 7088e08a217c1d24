"""Tells the statistics of a step: a table in ``main.log`` and on the terminal, ``metrics.jsonl``, and tracking services.

Special here: the first words of each table are those of the quickstart (``Epoch 1/5``, ``step 6/19``, ``global step 6``),
counted from 1; files count steps from 0. All durations come from one clock, and go on counting after a recovery. A
service that fails is left out from then on, because training must not depend on somebody else's server.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areno.observability.services import Service, ServiceGroup
from areno.observability.statistics import with_short_names
from areno.observability.tracker import without_counts
from areno.storage.run_dir import RunDirectory

_log = logging.getLogger(__name__)

_LEAST_WIDTH = 36


class StatsLogger:
    """Where the statistics of an experiment go; it closes its ``services``, and ``clock`` gives seconds."""

    def __init__(
        self,
        run_dir: RunDirectory,
        *,
        total_epochs: int,
        steps_per_epoch: int,
        services: Sequence[Service] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = run_dir
        self.total_epochs = total_epochs
        self._steps_per_epoch = steps_per_epoch
        self._services = ServiceGroup(services, run_dir.metrics_path)
        self._clock = clock
        self._start = self._previous = clock()
        self._global_step = self._x = -1
        self._held: dict[str, float] = {}

    def before_step(self, stats: Mapping[str, float], step: int = 0) -> None:
        """Tell what was measured before a step, most often the first: a line of that step in ``metrics.jsonl``.

        Services get it together with the step, whose place on their axis it would take. Raises ArenoError.
        """
        self._held = without_counts(stats)
        _log.info("before %s\n%s", f"global step {step + 1}" if step else "training", table(self._held))
        self._run_dir.append_metrics(step, self._held)

    def commit(self, epoch: int, step: int, global_step: int, stats: Mapping[str, float]) -> None:
        """Tell the numbers of one finished step, without counts (``...__count``). Raises ArenoError: they cannot be written."""
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
        sent = {**self._held, **numbers}
        self._held = {}
        self._services.log(self._x, sent)

    def state_dict(self) -> dict[str, Any]:
        """What a recovered run continues with."""
        return {"global_step": self._global_step, "x": self._x, "elapsed_s": self._clock() - self._start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last step of ``state``; later lines of the files are dropped. Raises ArenoError: it cannot."""
        self._global_step, self._x = state["global_step"], state["x"]
        self._previous = self._clock()
        self._start = self._previous - state["elapsed_s"]
        dropped = self._run_dir.truncate_after(self._global_step)
        if dropped:
            step = self._global_step + 1
            _log.info("%d lines of steps after global step %d are dropped and done again", dropped, step)

    def begin_anew(self) -> None:
        """Drop what an attempt wrote that was killed before its first restart point. Raises ArenoError: it cannot."""
        dropped = self._run_dir.truncate_after(-1)
        if dropped:
            _log.info("%d lines of an attempt that ended before its first restart point are dropped", dropped)

    def close(self) -> None:
        """Close the services; a second call does nothing."""
        self._services.close()
        _log.info("%d steps in %.1f s", self._global_step + 1, self._clock() - self._start)


def table(numbers: Mapping[str, float]) -> str:
    """One line per number, by name, with the values below each other."""
    width = max([_LEAST_WIDTH, *map(len, numbers)]) + 3
    return "\n".join(f"  {name + ' ':.<{width}} {_shown(numbers[name])}" for name in sorted(numbers))


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15) else f"{value:.6g}"
