"""Logs the decode throughput of the rollout loop, in ``rollout decode progress`` lines."""

import logging
import time

from areno.observability import log_lines

logger = logging.getLogger("areno.engine.inference")


class DecodeProgress:
    """Logs the decode throughput at most once every ``interval_s`` seconds. If ``interval_s`` is 0 or less, logs nothing."""

    def __init__(self, interval_s: float = 10.0, rank: int = 0, size: int = 1) -> None:
        self.interval_s = interval_s
        self.rank, self.size = rank, size
        self._since: float | None = None
        self._tokens = 0

    def step(self, active: int, cuda_graph: bool = False) -> None:
        """Count one decode step with ``active`` running sequences. Log the throughput once per ``interval_s`` seconds."""
        if self.interval_s <= 0:
            return
        now = time.perf_counter()
        if self._since is None:  # the duration of the first step is unknown
            self._since = now
            return
        self._tokens += active
        elapsed = now - self._since
        if elapsed >= self.interval_s:
            log_lines.decode_progress(logger, self.rank, self.size, active, cuda_graph, self._tokens / elapsed)
            self._since, self._tokens = now, 0

    def idle(self) -> None:
        """Discard the current measurement, so that the logged throughput does not include idle time."""
        self._since, self._tokens = None, 0
