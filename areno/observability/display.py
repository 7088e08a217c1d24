"""Shows the progress of a run: a live display on a terminal, or one log line per step elsewhere.

A thread redraws the display, so that the clock of the current phase advances during a step. Warnings scroll above the display.
The live display hides the terminal's cursor, and restores the cursor when it stops. The display is a context manager: it stops
at the end of its ``with`` block. If the process exits inside this block, an exit handler restores the cursor.
:mod:`areno.observability.screen` lays out the lines.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
from collections.abc import Mapping
from threading import RLock
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from areno.machine_memory import free_bytes, resident_bytes, total_bytes
from areno.observability.chart import printable, supports_unicode
from areno.observability.logs import route_console, shows_lines
from areno.observability.screen import Line, MemoryUse, RunHeading, ScreenState, ShownSample, Trend, frame

_log = logging.getLogger(__name__)

_PACE_STEPS = 10
_REDRAWS_PER_S = 4
_MEMORY_EVERY_S = 5.0


class ProgressDisplay:
    """Reports the progress of a trainer. The end of a ``with`` statement stops the display, even after an error.

    The ``stats`` of a step may contain ``reward_mean``, ``loss``, ``entropy``, ``grad_norm``, ``response_len``,
    ``truncated_ratio``, ``logp_abs_diff_mean``, ``staleness_mean``, ``staleness_max`` and ``tokens_per_second``. Missing
    statistics are not shown.
    """

    def __init__(self) -> None:
        self._pace = _Pace()
        self.total_steps = 0

    def start(self, total_steps: int, done_steps: int = 0, heading: RunHeading | None = None) -> None:
        """Start the display of a run of ``total_steps`` steps. A resumed run has already completed ``done_steps`` steps."""
        self.total_steps = total_steps
        self._pace = _Pace(done_steps)

    def phase(self, name: str) -> None:
        """Show the start of a phase, such as ``rollout``, ``reward``, ``train`` or ``save``."""

    def step_done(
        self,
        step: int,
        stats: Mapping[str, float],
        sample: ShownSample | None = None,
        parts: Mapping[str, float] | None = None,
    ) -> None:
        """Log a finished step. The argument ``step`` counts from 0, and the log counts from 1.

        Step 2 is logged as ``step 3/100 reward=0.125000 loss=0.001200 1.43 s/step ETA 0:02:18``. A live display shows the
        ``stats`` of the step, a ``sample``, and the mean of each of the reward's ``parts``.
        """
        self._pace.step_done(step)
        shown = [("reward", "reward_mean"), ("loss", "loss")]
        values = "".join(f" {label}={stats[key]:.6f}" for label, key in shown if key in stats)
        _log.info("step %d/%d%s %s", step + 1, self.total_steps, values, self._pace.describe(self.total_steps))

    def evaluated(self, text: str) -> None:
        """Report an evaluation on held-out data. A live display shows ``text`` until the next evaluation."""

    def warn(self, text: str) -> None:
        """Show and log a warning."""
        _log.warning("%s", text)

    def stop(self) -> None:
        """Stop the display. Further calls do nothing."""

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def create_progress(stream: TextIO | None = None) -> ProgressDisplay:
    """Create a ``LiveProgress`` on an interactive terminal, otherwise a ``PlainProgress``.

    A pipe, a file, ``TERM=dumb``, or an explicit log level of INFO or lower selects ``PlainProgress``.
    """
    target = stream or sys.stderr
    console = Console(file=target, highlight=False)
    interactive = target.isatty() and console.is_interactive and not shows_lines()
    return LiveProgress(console) if interactive else PlainProgress()


class PlainProgress(ProgressDisplay):
    """Reports progress as one log line per step. The phases within a step are not reported."""


class LiveProgress(ProgressDisplay):
    """Shows progress at the bottom of the terminal. The display is never higher than the terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._unicode = supports_unicode(console.file)
        self._lock = RLock()
        self._state = ScreenState()
        self._began = self._phase_start = time.monotonic()
        self._memory_read = -_MEMORY_EVERY_S
        self._live: Live | None = None

    def start(self, total_steps: int, done_steps: int = 0, heading: RunHeading | None = None) -> None:
        """Start drawing the display. The arguments are those of ``ProgressDisplay.start``."""
        super().start(total_steps, done_steps)
        self._state.heading = heading or RunHeading()
        self._began = time.monotonic()
        self.phase("starting")
        # Redirect only terminal output: `areno train > file` must keep writing to the file.
        self._live = Live(
            get_renderable=self.picture,
            console=self._console,
            refresh_per_second=_REDRAWS_PER_S,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        atexit.register(self.stop)
        route_console(self._print)
        self._live.start(refresh=True)

    def phase(self, name: str) -> None:
        """Show the name of the phase, and restart the clock of the phase."""
        with self._lock:
            self._state.phase, self._phase_start = name, time.monotonic()

    def step_done(
        self,
        step: int,
        stats: Mapping[str, float],
        sample: ShownSample | None = None,
        parts: Mapping[str, float] | None = None,
    ) -> None:
        """Log the step, and show its statistics and its sample."""
        super().step_done(step, stats, sample, parts)
        with self._lock:
            state = self._state
            state.stats = dict(stats)
            state.sample = sample or state.sample
            state.best_speed = max(state.best_speed, stats.get("tokens_per_second", 0.0))
            for label, name in (("reward", "reward_mean"), ("loss", "loss")):
                if name in stats:
                    state.trends.setdefault(label, Trend()).add(stats[name])
            for part, mean in (parts or {}).items():
                state.parts.setdefault(part, Trend()).add(mean)

    def evaluated(self, text: str) -> None:
        """Show ``text``, which describes the latest evaluation."""
        with self._lock:
            self._state.evaluation = text

    def warn(self, text: str) -> None:
        """Log the warning above the display, and show it in the display until newer warnings replace it."""
        with self._lock:
            self._state.warning_count += 1
            self._state.warnings.append(text)
        super().warn(text)

    def stop(self) -> None:
        """Stop the display, keep its last frame on the screen, and restore the cursor. Further calls do nothing."""
        with self._lock:
            live, self._live = self._live, None
        if live is None:
            return
        self.phase("finished" if self._pace.done >= self.total_steps else "stopped")
        route_console(None)
        atexit.unregister(self.stop)
        # A closed terminal must not end the run.
        with contextlib.suppress(OSError):
            live.stop()

    def picture(self) -> Picture:
        """Return the current frame in the size of the console."""
        with self._lock:
            state, pace, now = self._state, self._pace, time.monotonic()
            state.done, state.total = pace.done, self.total_steps
            state.rate, state.remaining = pace.rate, pace.remaining(self.total_steps)
            state.phase_time = "" if self._live is None else _clock(now - self._phase_start)
            state.run_time = _clock(now - self._began)
            if now - self._memory_read >= _MEMORY_EVERY_S:
                state.memory, self._memory_read = memory_use(), now
            size = self._console.size
            # The cursor is on the line below the frame.
            return Picture(frame(state, size.width, max(size.height - 1, 1), unicode=self._unicode))

    def _print(self, line: str) -> None:
        self._console.print(Text(printable(line)), soft_wrap=True)


class Picture:
    """A frame of the live display, for printing with the package ``rich``. Markup in ``lines`` is not interpreted."""

    def __init__(self, lines: list[Line]) -> None:
        self.lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            for text, style in line:
                yield Segment(text, console.get_style(style) if style else None)
            yield Segment.line()


def memory_use() -> MemoryUse:
    """Return the memory use of the current GPU.

    If CUDA is not initialized, return the memory use of this process and its descendants, and the free memory of the machine.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return MemoryUse(resident_bytes(os.getpid()), free_bytes(), total_bytes(), "used by this run")
    free, total = torch.cuda.mem_get_info()
    return MemoryUse(torch.cuda.memory_reserved(), free, total, "reserved")


class _Pace:
    def __init__(self, done_steps: int = 0) -> None:
        self.done = done_steps
        # An immutable tuple, because the drawing thread reads it.
        self._durations: tuple[float, ...] = ()
        self._last = time.monotonic()

    def step_done(self, step: int) -> None:
        now = time.monotonic()
        self._durations = (*self._durations, now - self._last)[-_PACE_STEPS:]
        self._last = now
        self.done = step + 1

    @property
    def _mean(self) -> float | None:
        durations = self._durations
        return sum(durations) / len(durations) if durations else None

    @property
    def rate(self) -> str:
        """Speed over the last steps, such as ``1.43 s/step`` or ``20.0 steps/s``; empty before the first step is completed."""
        mean = self._mean
        if mean is None:
            return ""
        return f"{mean:.2f} s/step" if mean >= 0.1 else f"{1 / max(mean, 1e-9):.1f} steps/s"

    def remaining(self, total_steps: int) -> str:
        """Return the estimated time left, such as ``0:02:18``; ``unknown`` before the first step is completed."""
        mean = self._mean
        return "unknown" if mean is None else _clock(mean * max(total_steps - self.done, 0))

    def describe(self, total_steps: int) -> str:
        """Return the speed and the time left, such as ``1.43 s/step ETA 0:02:18``."""
        return f"{self.rate} ETA {self.remaining(total_steps)}".strip()


def _clock(seconds: float) -> str:
    seconds = int(seconds)
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
