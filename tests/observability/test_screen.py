"""The screen as text at several sizes: what it shows, what it drops first, and that text from a run cannot control it."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from unicodedata import category

import pytest
from rich.cells import cell_len
from rich.console import Console

from areno.observability.display import LiveProgress
from areno.observability.health import HealthMonitor
from areno.observability.screen import RunHeading, ScreenState, ShownSample, Trend, frame
from areno.training import reporter
from tests.experiments.trainer_stage import run_kind

GAP_LIMIT = 0.05
HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m[bold red]Δ\r\u202e[/bold red]\x00{x}:smile:"


def display(width=80, height=24, *, encoding="utf-8", steps=30, sample="7 + 5 = 12"):
    """A live display in the middle of a run, on a console of this size."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    live = LiveProgress(Console(file=file, force_terminal=True, width=width, height=height))
    live.start(100, 0, RunHeading("grpo", "org/model-1B", "runs/one", GAP_LIMIT))
    for step in range(steps):
        live.phase("rollout")
        stats = {"reward_mean": step / 40, "loss": 0.25, "entropy": 1.5, "grad_norm": 0.125, "response_len": 120.0}
        stats |= {
            "truncated_ratio": 0.05,
            "logp_abs_diff_mean": 4e-3,
            "tokens_per_second": 2000.0 if step == 3 else 1000.0,
        }
        stats |= {"staleness_mean": 0.75, "staleness_max": 2.0}
        parts = {"right": step / 30, "short": 1 - step / 60}
        live.step_done(step, stats, ShownSample("You are helpful. " * 9 + "What is 7 + 5?", sample, 1.0), parts)
    live.evaluated("rewards_mean 0.612 after 20 steps, best 0.612 after 20")
    live.phase("train")
    return live


def lines_of(live, width=80, height=24):
    """The frame as lines of text, drawn by rich on a console of its own."""
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(live.picture(), end="")
    live.stop()
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def warned(live):
    """The display after a step with three health warnings."""
    monitor = HealthMonitor(max_new_tokens=128, logprob_gap_limit=GAP_LIMIT)
    stats = {"logp_abs_diff_mean": 0.06, "response_len": 120.0, "reward_errors": 3.0}
    for warning in monitor.observe(29, stats, [1.0, 0.0], [0, 0], [True, True]):
        live.warn(warning)
    return live


def test_everything_fits_on_a_terminal_of_80_by_24():
    lines = lines_of(display(steps=24))  # one step per column of a trend
    rising = "".join("▁▂▃▄▅▆▇█"[round(7 * step / 23)] for step in range(24))
    memory = next(line for line in lines if line.startswith("memory"))
    assert [line for line in lines if line is not memory] == [
        "── grpo org/model-1B ─────────────────────────────────────────────── runs/one ──",
        next(line for line in lines if line.startswith("step      24/100 ━━━")),
        "phase     train 0:00:00   run 0:00:00",
        f"reward    0.575   {rising}   0 to 0.575",
        f"  right   0.767   {rising}   0 to 0.767",
        f"  short   0.617   {rising[::-1]}   0.617 to 1",
        "update    loss 0.25   entropy 1.5   gradient 0.125   120 tokens per answer",
        "log-probs gap 4.0e-03   ok   warns above 0.05",
        "staleness 0.75 updates   at most 2",
        "speed     1,000 tokens/s   50 % of the fastest step",
        "eval      rewards_mean 0.612 after 20 steps, best 0.612 after 20",
        "sample    reward 1   … helpful. You are helpful. You are helpful. What is 7 + 5?",
        "          7 + 5 = 12",
    ]
    assert "GiB used by this run" in memory
    assert "GiB free" in memory


def test_three_warnings_are_shown_with_their_remedies():
    lines = lines_of(warned(display()))
    assert len(lines) <= 23, "one line is left for the cursor"
    assert "3 warnings" in lines[2]
    problems = [line for line in lines if line.startswith("warning")]
    assert len(problems) == 3
    text = "\n".join(lines)
    for remedy in ("→ Use --dtype float32", "→ Raise --max-context-len", "see the log for the reasons"):
        assert remedy in text
    assert lines[-2].startswith("sample"), "the warnings leave room for the sample"
    assert "  short   0.517" in text


def test_a_tall_terminal_shows_complete_warnings():
    text = " ".join(" ".join(lines_of(warned(display(100, 45)), 100, 45)).split())
    assert "Use --dtype float32; for a mixture-of-experts model, also use --return-routed-experts" in text
    assert "or run SFT first, so that the model learns to stop" in text


def test_only_the_last_three_warnings_stay_but_all_are_counted():
    live = display()
    for number in range(5):
        live.warn(f"step {number}: odd. Look")
    lines = lines_of(live)
    assert [line.split()[2] for line in lines if line.startswith("warning")] == ["4:", "3:", "2:"]
    assert "5 warnings" in lines[2]


def test_a_narrow_terminal_cuts_line_ends_but_no_values():
    lines = lines_of(warned(display(40)), 40)
    assert max(map(len, lines)) <= 40
    assert lines[0] == "── grpo org/model-1B ─────── runs/one ──"
    values = ("30/100", "train 0:00:00", "0.725", "0.967", "0.517", "loss 0.25", "gap 4.0e-03   ok", "0.75 updates")
    text = "\n".join(lines)
    assert [value for value in (*values, "1,000 tokens/s", "reward 1") if value not in text] == []


def test_a_short_terminal_keeps_what_matters_most():
    lines = lines_of(warned(display(80, 10)), 80, 10)
    assert len(lines) == 9
    kept = [line.split()[0] for line in lines]
    assert kept[:4] == ["──", "step", "phase", "reward"]
    assert "warning" in kept
    assert "sample" not in kept
    assert [line.split()[0] for line in lines_of(display(80, 4), 80, 4)] == ["step", "phase", "reward"]


@pytest.mark.parametrize("unicode", [True, False])
def test_frames_never_exceed_the_terminal_size(unicode):
    live = warned(display(sample="四" * 90 + "word " * 99))
    live.picture()
    for width in range(20, 130, 7):
        for height in (1, 2, 7, 23, 60):
            lines = frame(live._state, width, height, unicode=unicode)
            assert 1 <= len(lines) <= height
            assert max(sum(cell_len(text) for text, _ in line) for line in lines) <= width
    live.stop()


def test_text_from_a_run_cannot_control_the_terminal():
    live = display(sample=HOSTILE)
    live._state.heading = RunHeading(HOSTILE, HOSTILE, HOSTILE)
    live.evaluated(HOSTILE)
    live.warn(f"{HOSTILE}. {HOSTILE}")
    live.phase(HOSTILE)
    live.step_done(30, {"reward_mean": 0.5}, ShownSample(HOSTILE, HOSTILE, 0.5), {HOSTILE: 0.5})
    text = "\n".join(lines_of(live))
    assert not [char for char in text if category(char) in ("Cc", "Cf") and char != "\n"]
    assert text.count("[bold red]Δ") >= 5, "markup is shown as text"
    assert ":smile:" in text


def test_without_unicode_everything_is_ascii():
    lines = lines_of(warned(display(encoding="ascii", sample="四 héllo")))
    assert "".join(lines).isascii()
    assert lines[1].startswith("step      30/100 ####")
    assert "-> Raise --max-context-len" in "\n".join(lines)
    assert lines[-1].endswith("? h?llo")


def test_a_gap_above_the_warning_limit_is_marked_and_stale_samples_have_no_limit():
    live = display()
    live.step_done(30, {"reward_mean": 0.5, "logp_abs_diff_mean": 0.06})
    assert "log-probs gap 6.0e-02   too large   warns above 0.05" in lines_of(live)
    live = display()
    live._state.heading = RunHeading("grpo")
    assert "log-probs gap 4.0e-03" in lines_of(live)


def test_a_run_without_rewards_shows_the_trend_of_its_loss():
    live = LiveProgress(Console(file=io.StringIO(), force_terminal=True, width=80, height=24))
    live.start(3)
    for step, loss in enumerate((3.0, 2.0, math.nan)):
        live.step_done(step, {"loss": loss, "tokens_per_second": 500.0})
    lines = lines_of(live)
    assert "loss      nan   █▁    2 to 3" in lines
    assert not [line for line in lines if line.startswith(("reward", "sample", "log-probs"))]


def test_redrawing_a_long_run_takes_no_more_function_calls_than_a_short_one():
    def calls(steps: int, sample: str) -> int:
        live, count = warned(display(100, 50, steps=steps, sample=sample)), 0

        def counted(_frame: object, event: str, _argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        frame(live._state, 100, 49)  # fills caches
        sys.setprofile(counted)
        frame(live._state, 100, 49)
        sys.setprofile(None)
        live.stop()
        return count

    assert calls(10_000, "x" * 100_000) < 1.5 * calls(300, "x" * 2_000)


def test_a_trend_keeps_the_shape_of_a_long_series_in_few_points():
    trend = Trend()
    for step in range(10_000):
        trend.add(float(step))
    assert trend.last == 9999.0
    assert 100 < len(trend.points) < 240
    assert trend.points == sorted(trend.points)
    each = trend.points[1] - trend.points[0]
    assert trend.points[0] == pytest.approx((each - 1) / 2), "each point is the mean of its steps"
    assert trend.points[-1] > 9999 - 2 * each


def test_an_experiment_shows_its_statistics_under_the_same_labels(tmp_path, tiny_checkpoint, monkeypatch):
    shown = []

    class Kept(LiveProgress):
        def stop(self):
            shown.append(lines_of_state(self._state))
            super().stop()

    monkeypatch.setattr(
        reporter, "create_progress", lambda: Kept(Console(file=io.StringIO(), force_terminal=True, width=90, height=40))
    )
    run = run_kind("rl", tiny_checkpoint, tmp_path, {"total_train_steps": 2})
    lines = {line.split()[0]: line for line in shown[0] if line.strip()}
    rewards = run.column("rollout/reward/avg")
    assert lines["reward"].split()[1] == f"{rewards[-1]:.3f}"
    assert lines["update"].split()[1:3] == ["loss", f"{run.column('ppo_actor/update/actor_loss/avg')[-1]:.4g}"]
    gap = run.column("ppo_actor/update/logp_abs_diff_mean")[-1]
    assert lines["log-probs"].startswith(f"log-probs gap {gap:.1e}")
    assert {"staleness", "speed", "memory", "sample"} <= lines.keys()
    assert shown[0][0].startswith("── grpo ")


def lines_of_state(state: ScreenState):
    return ["".join(text for text, _ in line) for line in frame(state, 90, 40)]


# In a separate process: descendants of this one, started by earlier tests, may free memory meanwhile.
MEMORY = """
import json, os, subprocess, sys
from areno.observability.display import memory_use
own = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = memory_use()
program = "kept = b'x' * (80 << 20); print('ready', flush=True); input()"
with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    child.stdout.readline()
    during = memory_use().used
    child.communicate(b"\\n")
print(json.dumps([own, before.used, before.free, before.total, during]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_covers_this_process_and_those_it_started():
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    own, before, free, total, during = json.loads(done.stdout)
    assert before >= 0.9 * own
    assert 0 < free < total
    assert 70 << 20 < during - before < 200 << 20
