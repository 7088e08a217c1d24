"""OpenMP workers and kept memory, seen from outside: threads of the process, and page faults."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from areno.engine.model.loading import prepare
from areno.engine.rollout.threads import ThreadRule
from tests.support.tiny import tiny_module

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def run(program, **environment):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**kept, **environment}, check=True
    )
    return [float(word) for word in done.stdout.split()]


@linux
def test_a_thread_lets_its_workers_go_and_gets_them_back():
    program = """
import areno, os, time, torch
from areno.engine.native import release_workers
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


@linux
def test_freed_memory_is_used_again_without_asking_the_system_unless_the_weights_are_large():
    program = """
import areno, os, resource, torch
from areno.engine.native import keep_freed_memory
def step():
    return [torch.ones(1000, 1000) for _ in range(8)]  # 4 MB each, 32 MB together
for weights in map(int, os.environ["WEIGHTS"].split()):
    if os.fork():
        os.wait()
        continue
    keep_freed_memory(weights)
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, flush=True)
    os._exit(0)
"""
    pages = 5 * 32e6 / 4096
    small, large = run(program, WEIGHTS=f"0 {2**30}")
    assert small < 0.25 * pages
    assert large > 0.9 * pages
    [own] = run(program, WEIGHTS="0", MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
    assert own > 0.9 * pages


def test_threads_depend_on_the_size_of_the_model_and_not_on_what_is_trained(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    model = prepare(tiny_module("llama", layers=2, hidden=64, heads=2), "llama")
    rule = ThreadRule(model)
    assert rule.threads(1) == 1
    assert rule.threads(10_000) == 2
    model.module.requires_grad_(False)  # as when serving
    assert [ThreadRule(model).threads(rows) for rows in (1, 10_000)] == [1, 2]


def test_threads_that_ask_for_rollouts_do_not_lose_what_they_compute():
    """Workers are released by their own thread only, so another thread's parallel region goes on."""
    from areno.engine.native import release_workers

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
