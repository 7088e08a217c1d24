"""OpenMP workers and retained memory, observed through the threads of the process and page faults."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from areno.engine.model.loading import prepare
from areno.engine.plan import memory_probe
from areno.engine.rollout.threads import ThreadRule
from tests.support.examples import some_quick
from tests.support.tiny import tiny_module

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def run(program, **environment):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**kept, **environment}, check=True
    )
    return [float(word) for word in done.stdout.split()]


@linux
def test_a_thread_releases_its_workers_and_gets_them_back():
    program = """
import areno, os, time, torch
from areno.engine.libc_tuning import release_workers
torch.set_num_threads(3)
def threads():
    return len(os.listdir("/proc/self/task"))
def work():
    return (torch.randn(700, 700) @ torch.randn(700, 700)).exp().sum()
before = threads()
work()
with_workers = threads()
release_workers()
deadline = time.monotonic() + 10
while threads() > before and time.monotonic() < deadline:
    time.sleep(0.01)
released = threads()
work()
print(before, with_workers, released, threads())
release_workers()
release_workers()
"""
    before, with_workers, released, again = run(program)
    assert with_workers == before + 2
    assert released == before
    assert again == with_workers


_RETAIN = """
import areno, resource, torch
from areno.engine.libc_tuning import retained_bytes, trim_freed_memory, retain_freed_memory
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    return [torch.ones(1000, 1000) for _ in range(8)] + [torch.ones(10_000, 1000)]  # 4 MB each and 40, 72 MB together
def kept():
    return retained_bytes() // 2**20
retain_freed_memory()
"""


@pytest.fixture(params=some_quick(["our allocator", "no compiler"], "our allocator"))
def keeper(request, tmp_path):
    """Environment variables for each of the two ways to retain freed memory."""
    return {} if request.param == "our allocator" else {"CXX": "/no/compiler", "ARENO_CACHE_DIR": str(tmp_path)}


@linux
def test_freed_memory_is_reused_without_page_faults_unless_the_user_sets_malloc_limits(keeper):
    program = """
for _ in range(3):
    step()
before = faults()
for _ in range(5):
    step()
print(faults() - before)
"""
    pages = 5 * 72e6 / 4096
    [kept] = run(_RETAIN + program, **keeper)
    assert kept < 0.05 * pages
    [own] = run(_RETAIN + program, **keeper, MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
    assert own > 0.9 * pages


@linux
def test_retained_memory_counts_as_free_until_it_is_trimmed(keeper):
    program = """
held = torch.ones(100_000, 1000)  # 381 MiB
in_use = kept()
del held
freed = kept()
trim_freed_memory()
print(in_use, freed, kept())
"""
    in_use, freed, after = run(_RETAIN + program, **keeper)
    assert in_use <= 20
    assert 380 <= freed - in_use <= 400
    assert after <= 20


@pytest.mark.long
@linux
def test_our_allocator_wastes_little_where_blocks_of_many_sizes_come_and_go():
    program = """
import random
random.seed(0)
def held():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
before, live, used, most = held(), [], 0, 0
for step in range(2_000):
    if live and (used > 600 or random.random() < 0.45):
        used -= live.pop(random.randrange(len(live)))[0]
    else:
        size = random.choice((1, 3, 3, 3, 11, 30, random.randrange(1, 40)))
        live.append((size, torch.ones(size * 2**18)))
        used += size
        most = max(most, used)
print(held() - before, most, int(all(float(x[0] + x[-1]) == 2 for _, x in live)))
"""
    held, most, sound = run(_RETAIN + program)
    assert sound
    assert held < 1.3 * most


@linux
def test_our_allocator_serves_many_threads_and_forked_processes():
    program = """
import os, random, threading
from areno.engine.libc_tuning import _ALLOCATOR
torch.set_num_threads(1)
wrong = []
def work(seed):
    draw, live = random.Random(seed), {}
    for step in range(400):
        key = draw.randrange(8)
        if key in live and not bool((live.pop(key) == 10 * seed + key).all()):
            wrong.append(seed)
        live[key] = torch.full((draw.randrange(70_000, 500_000),), float(10 * seed + key))
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
for thread in threads:
    thread.start()
codes = []
for _ in range(20):
    child = os.fork()
    if child == 0:
        os._exit(0 if float(torch.ones(1_000_000).sum()) == 1e6 else 1)
    codes.append(os.waitpid(child, 0)[1])
for thread in threads:
    thread.join()
print(len(_ALLOCATOR), len(wrong), sum(codes))
"""
    assert run(_RETAIN + program) == [1, 0, 0]


@linux
def test_freed_memory_is_returned_if_little_else_is_available(monkeypatch):
    returned = []
    monkeypatch.setattr(memory_probe, "trim_freed_memory", lambda: returned.append(True))
    monkeypatch.setattr(memory_probe, "held_memory", lambda device: 6 << 30)
    for available, device, ranks, times in (
        (4, "cpu", 1, 0),
        (2, "cuda", 1, 0),
        (7, "cpu", 2, 0),
        (2, "cpu", 1, 1),
        (4, "cpu", 2, 2),
    ):
        monkeypatch.setattr(memory_probe, "available_bytes", lambda device, available=available: available << 30)
        memory_probe.avoid_shortage(torch.device(device), ranks)
        assert len(returned) == times


def test_threads_depend_on_the_size_of_the_model_and_not_on_what_is_trained(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    model = prepare(tiny_module("llama", layers=2, hidden=64, heads=2), "llama")
    rule = ThreadRule(model)
    assert rule.threads(1) == 1
    assert rule.threads(10_000) == 2
    model.module.requires_grad_(False)  # as when serving
    assert [ThreadRule(model).threads(rows) for rows in (1, 10_000)] == [1, 2]


def test_releasing_workers_does_not_disturb_the_work_of_other_threads():
    """Workers are released by their own thread only, so another thread's parallel region keeps running."""
    from areno.engine.libc_tuning import release_workers

    stop, results = threading.Event(), []

    def compute():
        x = torch.arange(250_000, dtype=torch.float64).view(500, 500)
        expected = (x @ x).sum().item()
        while not stop.is_set():
            results.append((x @ x).sum().item() == expected)

    worker = threading.Thread(target=compute)
    worker.start()
    while len(results) < 20 and worker.is_alive():
        release_workers()
    stop.set()
    worker.join()
    assert len(results) >= 20
    assert all(results)
