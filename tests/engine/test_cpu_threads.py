"""Threads on a CPU follow what other programs leave free."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from areno import cores
from areno.cores import CpuTimes, busy_elsewhere, cgroup_limit, openmp_threads, read_cpu_times
from areno.engine import cpu_threads
from areno.engine.cpu_threads import CpuThreads, adapted_threads
from tests.support.threads import torch_threads


def test_the_time_of_the_run_itself_is_not_counted_as_load_of_others():
    before, after = CpuTimes(10.0, 100.0, 50.0), CpuTimes(14.0, 107.0, 53.0)
    assert busy_elsewhere(before, after) == pytest.approx(1.0)  # 7 s busy less 3 s of its own, in 4 s


def test_rounding_of_the_clocks_gives_no_negative_load():
    assert busy_elsewhere(CpuTimes(0.0, 0.0, 0.0), CpuTimes(1.0, 0.99, 1.0)) == 0.0


@pytest.mark.parametrize(
    ("current", "most", "free", "expected"),
    [
        (2, 2, 2.0, 2),
        (2, 2, 1.9, 2),
        (2, 2, 1.33, 1),  # two threads and one busy program on two cores: each gets two thirds of one
        (1, 2, 1.0, 1),
        (1, 2, 1.5, 1),  # not enough to change again
        (1, 2, 1.8, 2),
        (1, 2, 2.0, 2),
        (2, 2, 0.0, 1),
        (64, 64, 62.0, 64),  # a small share of a large machine
        (64, 64, 40.0, 40),
        (40, 64, 64.0, 64),
        (4, 8, 8.0, 8),
    ],
)
def test_threads_follow_free_cores(current, most, free, expected):
    assert adapted_threads(current, most, free) == expected


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="clocks of single cores")
def test_a_busy_program_is_seen_and_own_work_is_not():
    hog = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    try:
        alone = psutil.Process(hog.pid)
        mine = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            time.sleep(0.2)
            # all_own counts both programs as the run's own; not_own counts only the second.
            all_own = [read_cpu_times(os.getpid())]
            not_own, taken = [read_cpu_times(mine.pid)], [sum(alone.cpu_times()[:2])]
            time.sleep(0.7)
            all_own.append(read_cpu_times(os.getpid()))
            not_own.append(read_cpu_times(mine.pid))
            taken.append(sum(alone.cpu_times()[:2]))
        finally:
            mine.kill()
            mine.wait()
    finally:
        hog.kill()
        hog.wait()
    wall = not_own[1].wall - not_own[0].wall
    assert busy_elsewhere(*not_own) >= (taken[1] - taken[0]) / wall - 0.1
    assert busy_elsewhere(*all_own) <= busy_elsewhere(*not_own) - (taken[1] - taken[0]) / wall + 0.2


@pytest.fixture
def clock(monkeypatch):
    """Fake readings of a machine with two cores; advance them by ``clock(seconds, cores that others keep busy)``."""
    state = {"wall": 100.0, "busy": 0.0}

    def advance(seconds, others):
        state["wall"] += seconds
        state["busy"] += seconds * others

    monkeypatch.setattr(cpu_threads, "read_cpu_times", lambda _: CpuTimes(state["wall"], state["busy"], 0.0))
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 2)
    monkeypatch.setattr(cpu_threads.time, "monotonic", lambda: state["wall"])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return advance


def test_the_number_of_threads_changes_during_a_run_and_each_change_is_logged(clock, caplog):
    with torch_threads(2), caplog.at_level("INFO", logger="areno"):
        threads = CpuThreads()
        threads.begin()
        seen = []
        for seconds, others in [(1, 0.0), (1, 2.0), (5, 1.0), (5, 1.0), (5, 0.0)]:
            clock(seconds, others)
            threads.apply()
            seen.append(torch.get_num_threads())
    assert seen == [2, 2, 1, 1, 2]  # the second reading came too early for a decision
    assert [record.message.split(";")[0] for record in caplog.records] == [
        "CPU threads: 2",
        "CPU threads: 1",
        "CPU threads: 2",
    ]


def test_processes_of_a_run_share_what_is_free(clock):
    with torch_threads(2):
        threads = CpuThreads()
        threads.share(2, root_pid=1)
        threads.begin()
        clock(1, 0.0)
        assert threads.current() == 1


def test_omp_num_threads_fixes_the_number(clock, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with torch_threads(2):
        threads = CpuThreads()
        threads.begin()
        clock(10, 2.0)
        threads.apply()
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("text", "expected"), [("3", 3), ("4,2", 4), ("", None), ("many", None), ("0", None)])
def test_what_omp_num_threads_says(monkeypatch, text, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert openmp_threads() == expected


def _group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_the_cpu_limit_of_a_container_is_the_smallest_up_to_the_root(tmp_path):
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("0::/jobs/mine\n")
    _group(root / "jobs" / "mine", cpu__max="max 100000")
    assert cgroup_limit(root, membership) is None
    _group(root / "jobs", cpu__max="250000 100000")
    assert cgroup_limit(root, membership) == 2.5


def test_the_cpu_limit_of_older_control_groups(tmp_path):
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("5:memory:/jobs\n4:cpu,cpuacct:/jobs\n0::/jobs\n")
    _group(root / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert cgroup_limit(root, membership) is None
    _group(root / "cpu" / "jobs", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    assert cgroup_limit(root, membership) == 1.5


def test_a_machine_without_control_groups_has_no_limit(tmp_path):
    assert cgroup_limit(tmp_path, tmp_path / "missing") is None


def test_usable_cores_are_at_least_one(monkeypatch):
    monkeypatch.setattr(cores, "cgroup_limit", lambda: 0.2)
    assert cores.usable_cores() == 1
