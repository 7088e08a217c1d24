"""Lays out the contents of the live display as lines of styled text for any terminal size.

:func:`frame` is a pure function of a :class:`ScreenState`. If the terminal has too few rows, the least important lines are
omitted. A line consists of a label and pieces of text. If a line is too long, its last pieces are omitted, and if necessary the
first piece is shortened. All texts of a run (answers, prompts, names and warnings) are reduced to printable characters, so no
text can contain a control sequence for the terminal.
"""

import math
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len, chop_cells, set_cell_size

from areno.observability.chart import one_line, sparkline

Piece = tuple[str, str]
"""A piece of a line: its text and its style."""
Line = list[Piece]

WARNINGS = 3
"""Maximum number of warnings that the display shows."""
_LABEL_WIDTH = 10
_TREND_WIDTH = 24
_TREND_POINTS = 120
_BAR_WIDTHS = (8, 40)
_SAMPLE_CHARS = 2000
_ANSWER_LINES = 6
_PARTS = 4  # reward parts are shown only if this many, or all, fit
_SENTENCE_END = re.compile(r"(?<=\.)\s+(?=[A-Z])")
_GIB = 2**30


class Trend:
    """A series of values, reduced to at most 240 points to keep drawing fast. All points are means over equally many steps."""

    def __init__(self) -> None:
        self.last = math.nan
        self.points: list[float] = []
        self._each = 1
        self._pending: list[float] = []

    def add(self, value: float) -> None:
        """Append the value of a step."""
        self.last = value
        self._pending.append(value)
        if len(self._pending) == self._each:
            self.points.append(_mean(self._pending))
            self._pending.clear()
        if len(self.points) == 2 * _TREND_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [_mean(pair) for pair in pairs]
            self._each *= 2

    def bounds(self) -> tuple[float, float] | None:
        """Return the smallest and the largest finite value in ``points``; None if no value is finite."""
        finite = [point for point in self.points if math.isfinite(point)]
        return (min(finite), max(finite)) if finite else None


@dataclass(frozen=True, slots=True)
class RunHeading:
    """What the first line of the display shows about the run.

    Attributes:
        gap_limit: mean absolute difference between rollout and train log-probs above which the run warns; infinite if the run
            never warns about this difference.
    """

    algorithm: str = ""
    model: str = ""
    path: str = ""
    gap_limit: float = math.inf


@dataclass(frozen=True, slots=True)
class ShownSample:
    """A sample that the display shows."""

    prompt: str
    completion: str
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory in bytes: ``used`` by the run, and ``free`` and ``total`` on the machine or GPU.

    ``used_label`` is the text that the display shows after the amount ``used``, such as "reserved".
    """

    used: int
    free: int
    total: int
    used_label: str


@dataclass(slots=True)
class ScreenState:
    """The contents of the display.

    ``trends`` maps ``reward`` to the trend of the mean reward, and ``loss`` to the trend of the loss. A key
    is missing if no step has reported its statistic. ``parts`` maps the name of each reward part to the trend of its mean.
    """

    heading: RunHeading = field(default_factory=RunHeading)
    done: int = 0
    total: int = 0
    rate: str = ""
    remaining: str = ""
    phase: str = "starting"
    phase_time: str = ""
    run_time: str = ""
    stats: Mapping[str, float] = field(default_factory=dict)
    trends: dict[str, Trend] = field(default_factory=dict)
    parts: dict[str, Trend] = field(default_factory=dict)
    best_speed: float = 0.0
    evaluation: str | None = None
    sample: ShownSample | None = None
    memory: MemoryUse | None = None
    warning_count: int = 0
    warnings: deque[str] = field(default_factory=lambda: deque(maxlen=WARNINGS))


@dataclass(slots=True)
class _Block:
    """Lines that belong together. If the terminal is small, blocks with the highest ``rank`` lose lines first.

    A block that would have fewer than ``least`` lines is omitted.
    """

    rank: int
    lines: list[Line]
    least: int = 1  # if there is room for fewer lines, the whole block is left out


def frame(state: ScreenState, width: int, height: int, *, unicode: bool = True) -> list[Line]:
    """Lay out at most ``height`` lines of at most ``width`` terminal cells. Without ``unicode``, the lines are ASCII."""
    blocks = list(_Layout(state, width, unicode).blocks())
    if sum(len(block.lines) for block in blocks) > height:
        blocks = list(_Layout(state, width, unicode, is_tight=True).blocks())
    kept = {id(block): 0 for block in blocks}
    left = height
    ranked = sorted(blocks, key=lambda block: block.rank)
    for block in ranked:
        if block.lines and block.least <= left:
            kept[id(block)] = block.least
            left -= block.least
    for block in ranked:
        more = min(len(block.lines) - kept[id(block)], left) if kept[id(block)] else 0
        kept[id(block)] += more
        left -= more
    return [line for block in blocks for line in block.lines[: kept[id(block)]]]


class _Layout:
    """Creates the blocks of a frame in display order. With ``is_tight``, warnings are shortened."""

    def __init__(self, state: ScreenState, width: int, unicode: bool, *, is_tight: bool = False) -> None:
        self.state, self.width, self.unicode, self.is_tight = state, width, unicode, is_tight
        self.more, self.arrow = ("…", "→") if unicode else ("...", "->")

    def blocks(self) -> Iterator[_Block]:
        state, stats = self.state, self.state.stats
        yield _Block(3, [self._heading()])
        yield _Block(0, [self._progress()])
        yield _Block(1, [self._phase()])
        if "reward" in state.trends:
            yield _Block(2, [self._trend("reward", state.trends["reward"], "green")])
            parts = [self._trend(f"  {name}", trend, "") for name, trend in state.parts.items()]
            yield _Block(7, parts, least=min(len(parts), _PARTS))
        elif "loss" in state.trends:
            yield _Block(2, [self._trend("loss", state.trends["loss"], "green")])
        if update := self._update():
            yield _Block(8, [update])
        if "logp_abs_diff_mean" in stats:
            yield _Block(5, [self._gap(stats["logp_abs_diff_mean"])])
        if "staleness_mean" in stats:
            yield _Block(6, [self._staleness()])
        if "tokens_per_second" in stats:
            yield _Block(4, [self._speed(stats["tokens_per_second"])])
        if state.memory is not None:
            yield _Block(9, [self._memory(state.memory)])
        if state.evaluation is not None:
            yield _Block(6, [self._line("eval", (self._clean(state.evaluation), ""))])
        yield _Block(3, [line for text in reversed(state.warnings) for line in self._warning(text)], least=2)
        if state.sample is not None:
            yield _Block(10, self._sample(state.sample), least=2)

    def _heading(self) -> Line:
        heading, rule = self.state.heading, "─" if self.unicode else "-"
        left = f" {self._clean(' '.join(filter(None, (heading.algorithm, heading.model)))) or 'areno'} "
        path = f" {self._clean(heading.path)} " if heading.path else ""
        free = self.width - cell_len(left) - cell_len(path) - 4
        if free < 0:
            path, free = "", self.width - cell_len(left) - 2
        text = self._shorten(left, self.width - 2)
        return [
            (rule * 2, "dim"),
            (text, "bold"),
            (rule * max(free, 0), "dim"),
            (path, ""),
            (rule * 2 if path else "", "dim"),
        ]

    def _progress(self) -> Line:
        state = self.state
        share = min(state.done / state.total, 1.0) if state.total else 0.0
        steps = f"{state.done}/{state.total}"
        after = [(f"{100 * share:3.0f} %", ""), (state.rate, ""), (f"ETA {state.remaining}", "")]
        lowest, highest = _BAR_WIDTHS
        while after and _LABEL_WIDTH + len(steps) + sum(len(text) + 2 for text, _ in after) + lowest + 1 > self.width:
            del after[-2 if len(after) > 1 else -1]
        used = _LABEL_WIDTH + len(steps) + sum(len(text) + 2 for text, _ in after) + 1
        cells = min(self.width - used, highest)
        if cells < lowest:
            return self._line("step", (steps, "bold"))
        full = round(cells * share)
        bar = [("━" if self.unicode else "#", "cyan", full), ("─" if self.unicode else "-", "dim", cells - full)]
        line = [self._label("step"), (steps, "bold"), (" ", "")]
        line += [(mark * count, style) for mark, style, count in bar]
        return [*line, *((f"  {text}", style) for text, style in after if text.strip())]

    def _phase(self) -> Line:
        state = self.state
        count = state.warning_count
        warned = [(f"{count} warning{'s' if count > 1 else ''}", "yellow")] if count else []
        total = [(f"run {state.run_time}", "dim")] if state.run_time else []
        return self._line("phase", (f"{self._clean(state.phase)} {state.phase_time}".rstrip(), "cyan"), *warned, *total)

    def _trend(self, label: str, trend: Trend, style: str) -> Line:
        bounds = trend.bounds()
        ends = [(f"{bounds[0]:.3g} to {bounds[1]:.3g}", "dim")] if bounds else []
        value = f"{trend.last:.3f}"
        cells = min(self.width - _LABEL_WIDTH - len(value) - 3, _TREND_WIDTH)
        drawn = sparkline(trend.points, width=max(cells, 0), unicode=self.unicode)
        return self._line(self._clean(label), (value, style), (drawn, style), *ends)

    def _update(self) -> Line | None:
        stats = self.state.stats
        forms = {"loss": "loss {:.4g}", "entropy": "entropy {:.3g}", "grad_norm": "gradient {:.3g}"}
        pieces = [form.format(stats[name]) for name, form in forms.items() if name in stats]
        if "response_len" in stats:
            pieces.append(f"{stats['response_len']:.0f} tokens per answer")
        if "truncated_ratio" in stats:
            pieces.append(f"{100 * stats['truncated_ratio']:.0f} % truncated")
        return self._line("update", *((piece, "") for piece in pieces)) if pieces else None

    def _gap(self, gap: float) -> Line:
        limit = self.state.heading.gap_limit
        if math.isinf(limit):
            return self._line("log-probs", (f"gap {gap:.1e}", ""))
        fine = gap <= limit
        verdict = ("ok", "green") if fine else ("too large", "bold yellow")
        return self._line("log-probs", (f"gap {gap:.1e}", ""), verdict, (f"warns above {limit:g}", "dim"))

    def _staleness(self) -> Line:
        stats = self.state.stats
        longest = [(f"at most {stats['staleness_max']:g}", "")] if "staleness_max" in stats else []
        return self._line("staleness", (f"{stats['staleness_mean']:.2g} updates", ""), *longest)

    def _speed(self, speed: float) -> Line:
        best = self.state.best_speed
        share = [(f"{100 * speed / best:.0f} % of the fastest step", "dim")] if best > 0 else []
        return self._line("speed", (f"{speed:,.0f} tokens/s", ""), *share)

    def _memory(self, memory: MemoryUse) -> Line:
        short = memory.free < memory.total / 20
        free = f"{memory.free / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
        used = f"{memory.used / _GIB:.1f} GiB {memory.used_label}"
        return self._line("memory", (used, ""), (free, "bold yellow" if short else ""))

    def _warning(self, text: str) -> list[Line]:
        problem, *remedy = _SENTENCE_END.split(self._clean(text), maxsplit=1)
        first, second = (1 if remedy else 2, 2) if self.is_tight else (4, 8)
        lines = [(line, "yellow") for line in self._wrap(problem, first)]
        lines += [(line, "") for sentence in remedy for line in self._wrap(f"{self.arrow} {sentence}", second)]
        return [self._line("" if position else "warning", line) for position, line in enumerate(lines)]

    def _sample(self, sample: ShownSample) -> list[Line]:
        room = self.width - _LABEL_WIDTH
        reward = "" if sample.reward is None else f"reward {sample.reward:.3g}"
        prompt = self._end(sample.prompt, room - len(reward) - 3 * bool(reward))
        answer = self._limited(chop_cells(self._clean(sample.completion), max(room, 2)) or [""], _ANSWER_LINES)
        lines = [self._line("sample", (reward, "bold"), (prompt, "dim"))]
        return lines + [self._line("", (part, "")) for part in answer]

    def _line(self, label: str, *pieces: Piece) -> Line:
        line: Line = [self._label(label)]
        room = self.width - cell_len(line[0][0])
        for position, (text, style) in enumerate(piece for piece in pieces if piece[0]):
            shown = self._shorten(text, room) if position == 0 else f"   {text}"
            if cell_len(shown) > room:
                break
            line.append((shown, style))
            room -= cell_len(shown)
        return line

    def _label(self, label: str) -> Piece:
        return set_cell_size(label, min(_LABEL_WIDTH - 1, self.width - 1)) + " ", "bold"

    def _clean(self, text: str) -> str:
        return one_line(text, _SAMPLE_CHARS, unicode=self.unicode)

    def _shorten(self, text: str, width: int) -> str:
        if cell_len(text) <= width:
            return text
        return set_cell_size(text, max(width - len(self.more), 0)).rstrip() + self.more[: max(width, 0)]

    def _end(self, text: str, width: int) -> str:
        tail = self._clean(text.rstrip()[-max(width, 1) :])
        if len(text.rstrip()) <= width and cell_len(tail) <= width:
            return tail
        while tail and cell_len(tail) + len(self.more) > width:
            tail = tail[1:]
        return self.more[: max(width, 0)] + tail

    def _limited(self, lines: list[str], limit: int) -> list[str]:
        room = self.width - _LABEL_WIDTH
        if len(lines) <= limit:
            return lines
        return [*lines[: limit - 1], self._shorten(set_cell_size(lines[limit - 1], room + 1), room)]

    def _wrap(self, text: str, limit: int) -> list[str]:
        """Wrap a text into at most ``limit`` lines that fit beside the label column. Words longer than a line are broken."""
        width, lines, line = self.width - _LABEL_WIDTH, [], ""
        for word in text.split(" "):
            for part in chop_cells(word, max(width, 2)) or [""]:
                longer = f"{line} {part}" if line else part
                if cell_len(longer) <= width:
                    line = longer
                else:
                    lines.append(line)
                    line = part
        return self._limited([*lines, line] if line else lines, limit)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
