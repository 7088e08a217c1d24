"""The progress display on a real pseudo terminal, and its absence everywhere else."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from areno.observability.display import PlainProgress, create_progress
from tests.support.cli import task_arguments, write_task

REPO = Path(__file__).resolve().parents[2]
ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
PREAMBLE = """
import logging, sys, time
from areno.observability.display import create_progress
from areno.observability.screen import RunHeading, ShownSample
from areno.observability.logs import setup_logging
from areno.storage.run_dir import RunDirectory
log = logging.getLogger("areno.tests.display")
"""


class Screen:
    """Emulates the parts of a terminal that the live display uses."""

    def __init__(self):
        self.lines, self.row, self.column, self.cursor_shown = [""], 0, 0, True

    def feed(self, text):
        position = 0
        while position < len(text):
            match = ESCAPE.match(text, position)
            if match:
                self._control(*match.groups())
                position = match.end()
            else:
                self._put(text[position])
                position += 1
        return self

    def _control(self, argument, command):
        if command in "hl" and argument == "?25":
            self.cursor_shown = command == "h"
        elif command == "A":
            self.row = max(0, self.row - int(argument or 1))
        elif command == "K":
            self.lines[self.row] = "" if argument == "2" else self.lines[self.row][: self.column]
        else:
            assert command == "m", f"unexpected control sequence {argument}{command}"

    def _put(self, char):
        if char == "\r":
            self.column = 0
        elif char == "\n":
            self.row, self.column = self.row + 1, 0
            self.lines += [""] * (self.row + 1 - len(self.lines))
        else:
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + char + line[self.column + 1 :]
            self.column += 1


def spawn_on_terminal(body, *arguments, env=None):
    """Run a program with a pseudo terminal as its controlling terminal; returns pid and the terminal's other end."""
    program = PREAMBLE + textwrap.dedent(body)
    # A UTF-8 locale on any machine, and no color settings of the caller.
    environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "ARENO_LOG_LEVEL")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30", "PYTHONIOENCODING": "utf-8"} | (
        env or {}
    )
    environment["PYTHONPATH"] = str(REPO)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-c", program, *arguments], environment)
    return pid, terminal


def read_terminal(terminal, until=None, timeout_s=60.0):
    """Text up to ``until``, or to the end of the program."""
    data, deadline = b"", time.monotonic() + timeout_s
    while until is None or until not in data:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"no answer in {timeout_s} s; so far: {data!r}"
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # how Linux reports that the other end is closed
            break
        if not chunk:
            break
        data += chunk
    return data.decode()


def run_on_terminal(body, *arguments, env=None):
    pid, terminal = spawn_on_terminal(body, *arguments, env=env)
    text = read_terminal(terminal)
    os.close(terminal)
    return text, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


TWO_STEPS = r"""
with setup_logging(RunDirectory(sys.argv[1])), create_progress() as progress:
    progress.start(10, 2, RunHeading("grpo", "tiny-model", "runs/one", 1e-3))
    for step, reward in ((2, 0.25), (3, 0.5)):
        progress.phase("rollout")
        log.info("stage=rollout_start")
        time.sleep(0.3)
        stats = {"reward_mean": reward, "loss": 0.0125, "logp_abs_diff_mean": 1.5e-6, "tokens_per_second": 1234.5}
        sample = ShownSample("3 + 4 =", "[bold]seven[/bold]\n\x1b[2J", reward)
        progress.step_done(step, stats, sample, {"right": reward, "short": 0.5})
    progress.warn("step 3: rewards look odd. Test the reward function")
    print("a stray print of a reward function")
"""


def test_the_live_display_shows_steps_numbers_sample_and_warnings(tmp_path):
    text, code = run_on_terminal(TWO_STEPS, str(tmp_path))
    screen = Screen().feed(text)
    shown = "\n".join(screen.lines)
    assert code == 0, shown
    assert "── grpo tiny-model ──" in shown
    assert re.search(r"^step +4/10 ━+─+ +40 %  0\.\d\d s/step  ETA 0:00:0\d$", shown, re.MULTILINE)
    assert re.search(r"^phase +stopped   1 warning   run 0:00:0\d *$", shown, re.MULTILINE)
    assert re.search(r"^reward +0\.500   ▁█   0\.25 to 0\.5 *$", shown, re.MULTILINE)
    assert re.search(r"^  right +0\.500   ▁█ ", shown, re.MULTILINE)
    assert re.search(r"^log-probs gap 1\.5e-06   ok   warns above 0\.001 *$", shown, re.MULTILINE)
    assert re.search(r"^speed +1,23[45] tokens/s   100 % of the fastest step *$", shown, re.MULTILINE)
    assert re.search(r"^memory +\d+\.\d GiB used by this run   \d+\.\d of \d+\.\d GiB free *$", shown, re.MULTILINE)
    assert re.search(r"^warning +step 3: rewards look odd\. *\n +→ Test the reward function *$", shown, re.MULTILINE)
    assert re.search(r"^sample +reward 0\.5   3 \+ 4 = *\n +\[bold\]seven\[/bold\]↵�\[2J *$", shown, re.MULTILINE)
    assert screen.cursor_shown


def test_lines_are_printed_above_the_live_display_and_leave_it_intact(tmp_path):
    text, _ = run_on_terminal(TWO_STEPS, str(tmp_path))
    screen = Screen().feed(text)
    lines = [line.rstrip() for line in screen.lines if line.strip()]
    form = (
        r"\d{4}-\d\d-\d\d .* WARNING areno\.observability\.display: step 3: rewards look odd\. Test the reward function"
    )
    assert re.fullmatch(form, lines[0]), "only warnings are printed"
    assert lines[1] == "a stray print of a reward function"
    labels = "── step phase reward right short update log-probs speed memory warning → sample [bold]seven[/bold]↵�[2J"
    assert [line.split()[0] for line in lines[2:]] == labels.split(), "the display is drawn once, without torn copies"


def test_the_log_file_has_what_the_terminal_had_no_room_for(tmp_path):
    text, _ = run_on_terminal(TWO_STEPS, str(tmp_path))
    assert "stage=rollout_start" not in text
    log = (tmp_path / "log.txt").read_text()
    assert log.count("stage=rollout_start") == 2
    assert "step 4/10 reward=0.500000 loss=0.012500" in log
    assert "rewards look odd" in log
    assert "step 4/10" not in text.replace(" ", "")


def test_the_phase_clock_ticks_during_a_step(tmp_path):
    body = """
    with create_progress() as progress:
        progress.start(3)
        progress.phase("train")
        time.sleep(1.7)
    """
    text, _ = run_on_terminal(body)
    plain = ESCAPE.sub("", text)
    assert "train 0:00:00" in plain
    assert "train 0:00:01" in plain


def test_an_exception_restores_the_cursor_and_its_traceback_is_readable():
    body = """
    with create_progress() as progress:
        progress.start(3)
        raise RuntimeError("the engine died")
    """
    text, code = run_on_terminal(body)
    screen = Screen().feed(text)
    assert code == 1
    assert screen.cursor_shown
    assert "RuntimeError: the engine died" in [line.rstrip() for line in screen.lines]


def test_a_program_that_never_stops_the_display_gets_its_cursor_back_at_exit():
    text, code = run_on_terminal('progress = create_progress()\nprogress.start(3)\nsys.exit("bye")')
    assert code == 1
    assert Screen().feed(text).cursor_shown


def test_ctrl_c_restores_the_cursor():
    body = """
    with create_progress() as progress:
        progress.start(3)
        progress.phase("sleeping")
        time.sleep(60)
    """
    pid, terminal = spawn_on_terminal(body)
    text = read_terminal(terminal, until=b"sleeping")
    os.write(terminal, b"\x03")
    text += read_terminal(terminal)
    os.close(terminal)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    screen = Screen().feed(text.replace("^C", ""))
    assert code == -signal.SIGINT
    assert screen.cursor_shown
    assert any(line.startswith("KeyboardInterrupt") for line in screen.lines)


def test_a_run_outlives_its_terminal(tmp_path):
    body = """
    import pathlib, signal
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with setup_logging(RunDirectory(sys.argv[1])), create_progress() as progress:
        progress.start(1)
        progress.phase("listening")
        time.sleep(1.0)
        progress.warn("nobody hears this")
        progress.step_done(0, {"loss": 0.5})
    pathlib.Path(sys.argv[1], "survived").touch()
    """
    pid, terminal = spawn_on_terminal(body, str(tmp_path))
    read_terminal(terminal, until=b"listening")
    os.close(terminal)
    os.waitpid(pid, 0)
    assert (tmp_path / "survived").exists()
    assert "step 1/1 loss=0.500000" in (tmp_path / "log.txt").read_text()


def test_a_terminal_without_unicode_gets_ascii(tmp_path):
    text, code = run_on_terminal(TWO_STEPS, str(tmp_path), env={"PYTHONIOENCODING": "ascii:backslashreplace"})
    assert code == 0
    assert text.isascii()
    assert "reward    0.500   _#" in "\n".join(Screen().feed(text).lines)


def test_a_terminal_without_colors_gets_none(tmp_path):
    colored, _ = run_on_terminal(TWO_STEPS, str(tmp_path / "one"))
    plain, code = run_on_terminal(TWO_STEPS, str(tmp_path / "two"), env={"NO_COLOR": "1"})
    assert code == 0
    assert re.search(r"\x1b\[[0-9;]*3[0-7]m", colored)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", plain)
    assert "reward    0.500   ▁█" in "\n".join(Screen().feed(plain).lines)


@pytest.mark.parametrize("level", ["debug", "INFO"])
def test_a_debug_or_info_level_on_a_terminal_gives_plain_lines(tmp_path, level):
    text, code = run_on_terminal(TWO_STEPS, str(tmp_path), env={"ARENO_LOG_LEVEL": level})
    assert code == 0
    assert "\x1b" not in text
    assert text.count("stage=rollout_start") == 2
    assert "step 4/10 reward=0.500000" in text


def test_the_warning_level_keeps_the_display(tmp_path):
    text, _ = run_on_terminal(TWO_STEPS, str(tmp_path), env={"ARENO_LOG_LEVEL": "warning"})
    assert "── grpo tiny-model ──" in "\n".join(Screen().feed(text).lines)


def test_a_real_run_shows_the_display_and_keeps_its_documented_lines_in_the_log(tmp_path, tiny_checkpoint):
    words = task_arguments("grpo", tiny_checkpoint, write_task(tmp_path / "task"), tmp_path / "run")
    words += ["--max-steps", 3, "--eval-dataset-path", tmp_path / "task" / "data.jsonl", "--eval-max-rows", 2]
    body = "from areno.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    size = {"COLUMNS": "80", "LINES": "24", "OMP_NUM_THREADS": "1"}
    text, code = run_on_terminal(body, *map(str, words), env=size)
    screen = Screen().feed(text)
    assert code == 0, text
    assert screen.cursor_shown
    shown = [line.rstrip() for line in screen.lines]
    (begin,) = (i for i, line in enumerate(shown) if line.startswith("── grpo"))
    end = next(i for i, line in enumerate(shown) if i > begin and " INFO " in line)  # the line about the end of the run
    last = shown[begin:end]
    assert len(last) < 24
    assert max(map(len, last)) <= 80
    assert last[1].startswith("step      3/3 ━")
    assert last[2].startswith("phase     finished")
    labels = "── step phase reward update log-probs speed memory eval warning sample"
    assert [line.split()[0] for line in last if not line.startswith(" ")] == labels.split()
    assert not [
        line for line in shown if "rollout_start" in line or "train_stats" in line or "step 3/3 reward=" in line
    ]
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    documented = ("role=policy stage=rollout_start", "metric=reward_mean value=", "train_stats={", "step 3/3 reward=")
    assert [part for part in documented if part not in log] == []


def test_a_dumb_terminal_gets_plain_lines(tmp_path):
    text, code = run_on_terminal(TWO_STEPS, str(tmp_path), env={"TERM": "dumb"})
    assert code == 0
    assert "\x1b" not in text
    assert "step 4/10 reward=0.500000" in text


@pytest.mark.parametrize("force", [{}, {"FORCE_COLOR": "1"}], ids=["default", "FORCE_COLOR"])
def test_a_pipe_gets_plain_lines_without_escape_codes(tmp_path, force):
    environment = {**os.environ, "PYTHONPATH": str(REPO), "TERM": "xterm-256color", **force}
    environment.pop("ARENO_LOG_LEVEL", None)
    result = subprocess.run(
        [sys.executable, "-c", PREAMBLE + TWO_STEPS, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "a stray print of a reward function\n"
    assert "\x1b" not in result.stderr
    messages = [line.split(": ", 1)[1] for line in result.stderr.splitlines()]
    step = r"reward=0\.\d{6} loss=0\.012500 0\.\d\d s/step ETA 0:00:0\d"
    expected = [
        r"stage=rollout_start",
        rf"step 3/10 {step}",
        r"stage=rollout_start",
        rf"step 4/10 {step}",
        r"step 3: rewards look odd\. Test the reward function",
    ]
    assert len(messages) == len(expected)
    assert all(re.fullmatch(pattern, text) for pattern, text in zip(expected, messages, strict=True)), messages


def test_a_file_gets_the_plain_display(tmp_path):
    with open(tmp_path / "err.txt", "w") as stream:
        assert isinstance(create_progress(stream), PlainProgress)


def test_stop_may_be_repeated_and_come_before_start():
    pid, terminal = spawn_on_terminal(
        "progress = create_progress()\nprogress.stop()\nprogress.start(1)\nprogress.stop()\nprogress.stop()"
    )
    text = read_terminal(terminal)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, text
