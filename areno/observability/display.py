"""Progress of a run: a live display on a terminal, one log line per step elsewhere.

The live display shows nothing that is not also in ``log.txt`` or ``metrics.jsonl``. A separate thread redraws it, so the
phase clock advances during a step; log lines scroll above it. The cursor is restored however the run ends: by the
``with`` block, or by an exit handler.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import time
from collections.abc import Mapping
from threading import RLock
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areno.observability.chart import one_line, sparkline, supports_unicode
from areno.observability.logs import BESIDE_DISPLAY, route_console

_log = logging.getLogger(__name__)

_PACE_STEPS = 10
_REDRAWS_PER_S = 4
_SAMPLE_CHARS = 200


class ProgressDisplay:
    """Progress reports of a trainer. Use it as a context manager, so that it always stops.

    The ``stats`` of a step may contain ``reward_mean``, ``loss``, ``logp_abs_diff_mean`` and ``tokens_per_second``; missing
    ones are not shown.
    """

    def __init__(self) -> None:
        self._pace = _Pace()
        self.total_steps = 0

    def start(self, total_steps: int, done_steps: int = 0) -> None:
        """Start a run of ``total_steps``, of which ``done_steps`` were done before it was resumed."""
        self.total_steps = total_steps
        self._pace = _Pace(done_steps)

    def phase(self, name: str) -> None:
        """Enter the phase ``name`` (``rollout``, ``reward``, ``train``, ``save``)."""

    def step_done(self, step: int, stats: Mapping[str, float], sample: str | None = None) -> None:
        """Log a finished step (from 0) as ``step 3/100 reward=0.125000 loss=0.001200 1.43 s/step ETA 0:02:18``.

        A live display also shows the beginning of ``sample``, a completion of the step.
        """
        self._pace.step_done(step)
        shown = [("reward", "reward_mean"), ("loss", "loss")]
        values = "".join(f" {label}={stats[key]:.6f}" for label, key in shown if key in stats)
        line = (step + 1, self.total_steps, values, self._pace.describe(self.total_steps))
        _log.info("step %d/%d%s %s", *line, extra={BESIDE_DISPLAY: True})

    def evaluated(self, text: str) -> None:
        """Report an evaluation on held-out data; a live display shows ``text`` until the next one."""

    def warn(self, text: str) -> None:
        """Show and log a warning."""
        _log.warning("%s", text)

    def stop(self) -> None:
        """Stop the display; idempotent."""

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def create_progress(stream: TextIO | None = None) -> ProgressDisplay:
    """Create a ``LiveProgress`` on an interactive terminal, else (pipe, file, ``TERM=dumb``) a ``PlainProgress``."""
    target = stream or sys.stderr
    console = Console(file=target, highlight=False)
    return LiveProgress(console) if target.isatty() and console.is_interactive else PlainProgress()


class PlainProgress(ProgressDisplay):
    """One log line per step; the trainer logs the phases."""


class LiveProgress(ProgressDisplay):
    """A live display of a few lines at the bottom of the terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._unicode = supports_unicode(console.file)
        self._lock = RLock()
        self._phase, self._phase_start = "starting", time.monotonic()
        self._stats: dict[str, float] = {}
        self._trend: list[float] = []
        self._sample: str | None = None
        self._evaluation: str | None = None
        self._warnings = 0
        self._live: Live | None = None

    def start(self, total_steps: int, done_steps: int = 0) -> None:
        """Start drawing; arguments as in ``ProgressDisplay.start``."""
        super().start(total_steps, done_steps)
        self.phase("starting")
        # Redirect only terminal output: `areno train > file` must keep writing to the file.
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            refresh_per_second=_REDRAWS_PER_S,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        atexit.register(self.stop)
        route_console(self._print)
        self._live.start(refresh=True)

    def phase(self, name: str) -> None:
        """Show ``name`` and restart the phase clock."""
        with self._lock:
            self._phase, self._phase_start = name, time.monotonic()

    def step_done(self, step: int, stats: Mapping[str, float], sample: str | None = None) -> None:
        """Log the step, as one line above the display, and show its numbers and sample."""
        super().step_done(step, stats, sample)
        with self._lock:
            self._stats = dict(stats)
            self._sample = sample if sample is not None else self._sample
            value = stats.get("reward_mean", stats.get("loss"))
            if value is not None:
                self._trend.append(value)

    def evaluated(self, text: str) -> None:
        """Show the last evaluation."""
        with self._lock:
            self._evaluation = text

    def warn(self, text: str) -> None:
        """Count the warning, and log it above the display."""
        with self._lock:
            self._warnings += 1
        super().warn(text)

    def stop(self) -> None:
        """Keep the last frame on the screen and restore the cursor; idempotent."""
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

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)

    def _render(self) -> RenderableType:
        with self._lock:
            lines = [self._bar(), self._phase_line()]
            if self._stats:
                lines.append(self._stats_line())
            if self._evaluation is not None:
                lines.append(Text.assemble(("eval    ", "bold"), self._evaluation))
            if self._sample is not None:
                shown = one_line(self._sample, _SAMPLE_CHARS, unicode=self._unicode)
                lines.append(Text.assemble(("sample  ", "bold"), (shown, "dim")))
            return Group(*lines)

    def _bar(self) -> RenderableType:
        row = Table.grid(padding=(0, 1))
        done = self._pace.done
        share = f"{100 * done / self.total_steps:3.0f} %" if self.total_steps else ""
        bar = ProgressBar(total=max(self.total_steps, 1), completed=done, width=24, complete_style="cyan")
        row.add_row(Text(f"step {done}/{self.total_steps}", "bold"), bar, share, self._pace.describe(self.total_steps))
        return row

    def _phase_line(self) -> RenderableType:
        elapsed = _clock(time.monotonic() - self._phase_start)
        line = Text.assemble(("phase   ", "bold"), (self._phase, "cyan"), f" {elapsed}")
        if self._warnings:
            line.append(f"   warnings {self._warnings}", "yellow")
        return line

    def _stats_line(self) -> RenderableType:
        stats = self._stats
        line = Text(no_wrap=True, overflow="ellipsis")
        if "reward_mean" in stats:
            line.append("reward  ", "bold").append(f"{stats['reward_mean']:.3f} ", "green")
        else:
            line.append("loss    ", "bold")
        line.append(sparkline(self._trend, width=24, unicode=self._unicode))
        for label, key, form in (
            ("loss", "loss", ".4g"),
            ("logp gap", "logp_abs_diff_mean", ".1e"),
            ("tokens/s", "tokens_per_second", ",.0f"),
        ):
            if key in stats:
                line.append(f"   {label} ", "dim").append(f"{stats[key]:{form}}")
        return line


class _Pace:
    """Average time of the last steps, and the estimated time left."""

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

    def describe(self, total_steps: int) -> str:
        """Rate and time left, such as ``1.43 s/step ETA 0:02:18``."""
        durations = self._durations
        if not durations:
            return "ETA unknown"
        mean = sum(durations) / len(durations)
        rate = f"{mean:.2f} s/step" if mean >= 0.1 else f"{1 / max(mean, 1e-9):.1f} steps/s"
        return f"{rate} ETA {_clock(mean * max(total_steps - self.done, 0))}"


def _clock(seconds: float) -> str:
    seconds = int(seconds)
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
