"""Memory figures of a step come from the kernel, and include memory that was freed and memory of child processes."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from areno.observability.step_memory import AVAILABLE, GIB, PEAK, PEAK_GPU, StepMemory

_TAKES = "import sys; taken = bytearray(b'x') * (300 * 2**20); del taken; print('freed', flush=True); sys.stdin.read()"


def figures() -> dict[str, float]:
    return StepMemory(lambda: 0).figures()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel keeps no peak")
def test_the_peak_covers_that_of_the_kernel_and_includes_memory_freed_by_a_child():
    before = figures()[PEAK]
    (own,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert before >= int(own) / 2**20
    with subprocess.Popen([sys.executable, "-c", _TAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"freed\n"
        assert psutil.Process(child.pid).memory_info().rss < 200 * 2**20
        assert 0.28 < figures()[PEAK] - before < 0.4
        child.stdin.close()
    assert figures()[PEAK] - before < 0.1


def test_the_peak_of_an_ended_process_is_kept():
    memory = StepMemory(lambda: 0)
    with subprocess.Popen([sys.executable, "-c", _TAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        peak = memory.figures()[PEAK]
        child.stdin.close()
    first = memory.figures()
    while memory.figures() is first:
        time.sleep(0.01)
    assert memory.figures()[PEAK] >= peak


def test_available_memory_is_less_than_the_machine_has():
    assert 0 < figures()[AVAILABLE] <= psutil.virtual_memory().total / GIB


def test_a_gpu_has_a_figure_only_if_there_is_one():
    assert PEAK_GPU not in figures()
    assert StepMemory(lambda: 3 * 2**29).figures()[PEAK_GPU] == 1.5


def test_a_slow_reading_is_reused_instead_of_slowing_down_the_steps():
    readings = []

    def slow() -> int:
        readings.append(time.sleep(0.05))
        return 0

    memory = StepMemory(slow)
    assert memory.figures() == memory.figures() == memory.figures()
    assert len(readings) == 1
