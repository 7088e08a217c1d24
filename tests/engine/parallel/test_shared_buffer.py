"""Sums and weights in shared memory, against float64 and one process; ranks that die leave nothing behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from areno.engine.parallel.channels import RankGroup, SharedGroup
from areno.engine.parallel.segment import ANONYMOUS
from areno.engine.parallel.workers import WorkerGroup
from areno.engine.train.optimizer import MasterAdamW, OptimizerOptions
from areno.errors import EngineError
from tests.engine.parallel.objects import members
from tests.support.cli import start_text
from tests.support.processes import alive

needs_anonymous_memory = pytest.mark.skipif(not ANONYMOUS, reason="anonymous shared memory needs Linux")
KINDS = [SharedGroup, RankGroup]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    group = WorkerGroup(members(tmp_path_factory.mktemp("meet"), 4), stall_s=120)
    yield group
    group.close()


@pytest.fixture
def left_behind():
    """Return a function that lists new names in shared memory, except those that other programs' OpenMP leaves."""

    def names() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if "KMP" not in name and "areno" in name}

    before = names()
    yield lambda: names() - before
    assert names() <= before


def numbers(ranks: int, count: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=random).to(dtype) for _ in range(ranks)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_match_float64(size, kind, four):
    ranks = list(range(size))
    four.call("join", f"{kind.__name__}-{size}", size, kind, ranks=ranks)
    for share in (1, 37, 4096):
        count = share * size
        rounds = [numbers(size, count, torch.float32, seed) for seed in range(3)]
        found = four.call("add_up", count, rounds, ranks=ranks)
        again = four.call("add_up", count, rounds, ranks=ranks)
        for index, values in enumerate(rounds):
            truth = torch.stack(values).double().sum(0)
            got = torch.cat([parts[index] for parts in found])
            assert (got - truth).abs().max() <= size * torch.finfo(torch.float32).eps * truth.abs().max()
            assert torch.equal(got, torch.cat([parts[index] for parts in again]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_memory_and_collectives_combine_all_ranks(dtype, four):
    for size in (2, 4):
        ranks = list(range(size))
        four.call("join", f"common-{size}-{dtype}", size, ranks=ranks)
        expected = torch.arange(1, size + 1).repeat_interleave(33).to(dtype)
        for found in four.call("write_common", 33, dtype, ranks=ranks):
            if ANONYMOUS:
                assert torch.equal(found, expected)
        parts = numbers(size, 33, dtype, seed=size)
        truth = torch.stack(parts).double().sum(0)
        for joined in four.call("call", "all_gather_tensor", parts, ranks=ranks):
            assert torch.equal(joined, torch.cat(parts))
        totals = four.call("call", "all_reduce", parts, ranks=ranks)
        for total in totals:
            assert torch.equal(total, totals[0])
            assert (total.double() - truth).abs().max() <= size * torch.finfo(dtype).eps * truth.abs().max()


# Uneven shapes, not divisible by the number of ranks or the alignment of buffers; one parameter is empty.
SHAPES = {"embedding": (41, 7), "norm": (7,), "empty": (0, 7), "projection": (5, 7), "scale": (), "head": (3, 111)}
CONFIG = OptimizerOptions(lr=1e-2, eps=1e-6)


def lessons(seed: int) -> list[list[dict[str, torch.Tensor]]]:
    """Return the gradients of three steps of six passes; one parameter has none in step two, another zeros in step three."""
    random = torch.Generator().manual_seed(seed)
    steps = [
        [{name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()} for _ in range(6)]
        for _ in range(3)
    ]
    for gradients in steps[1]:
        del gradients["projection"]
    for gradients in steps[2]:
        gradients["head"][:, 50:] = 0.0
    return steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_an_optimizer_sharded_across_replicas_matches_one_process(size, dtype, four):
    ranks = list(range(size))
    four.call("join", f"learn-{size}-{dtype}", size, ranks=ranks)
    random = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=random).to(dtype) for name, shape in SHAPES.items()}
    steps = lessons(seed=size)
    found = four.call("learn", weights, steps, CONFIG, ranks=ranks)

    masters = {name: nn.Parameter(value.float()) for name, value in weights.items()}
    truth = MasterAdamW(list(masters.items()), CONFIG)
    for number, step in enumerate(steps):
        summed = {name: sum(g[name].to(dtype).double() for g in step if name in g) for name in SHAPES}
        for name, master in masters.items():
            total = summed[name]
            master.grad = total.float() if isinstance(total, torch.Tensor) else torch.zeros_like(master)
        truth.step()
        totals = [total for total in summed.values() if isinstance(total, torch.Tensor)]
        norm = sum(float(total.square().sum()) for total in totals) ** 0.5
        for _, stats, _ in found:
            assert stats[number].norm == pytest.approx(norm, rel=1e-6)
            assert stats[number].nonzero == sum(int(total.count_nonzero()) for total in totals)
            assert stats[number].total == sum(value.numel() for value in weights.values())
    for name, master in masters.items():
        for learned, _, in_common in found:
            assert in_common == ANONYMOUS
            assert torch.equal(learned[name], found[0][0][name])
            gap = (learned[name].double() - master.double()).abs()
            bound = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
            assert (gap <= bound * master.double().abs().clamp(min=1.0)).all(), name


@needs_anonymous_memory
def test_shared_memory_is_anonymous_and_waiting_takes_no_cpu_time(four, left_behind):
    four.call("join", "names", 4)
    four.call("add_up", 4096, [numbers(4, 4096, torch.float32, 0)])
    for mapped, files in four.call("opened"):
        assert len(mapped) >= 4
        assert all("memfd:areno-memory (deleted)" in line for line in mapped)
        assert len(files) == len(mapped), "each mapping keeps its file open, and nothing else does"
    assert left_behind() == set()
    times = four.call("wait_for_others", 2, 1.0)
    assert max(times) < 0.3


@needs_anonymous_memory
def test_all_ranks_send_if_one_has_no_shared_memory(tmp_path):
    group = WorkerGroup(members(tmp_path, 2), stall_s=60)
    try:
        group.call("join", "meet", 2)
        group.call("refuse_memory", ranks=[1])
        values = numbers(2, 64, torch.float32, 0)
        found = group.call("add_up", 64, [values])
        assert torch.allclose(torch.cat([parts[0] for parts in found]), values[0] + values[1], atol=1e-6)
        assert all("areno-memory" not in line for mapped, _ in group.call("opened") for line in mapped)
        group.call("refuse_memory", ranks=[0])
        assert group.call("write_common", 5, torch.float32) == [None, None]
    finally:
        group.close()


@needs_anonymous_memory
def test_a_rank_that_dies_in_a_sum_ends_the_group_and_is_named(tmp_path, left_behind):
    group = WorkerGroup(members(tmp_path, 2), stall_s=60)
    group.call("join", "meet", 2)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"rank 1 of 2 \(process \d+\) was killed by signal 9 during add_up_for_ever"):
        group.call("add_up_for_ever", 1)
    assert time.monotonic() - began < 15
    group.close()
    assert not any(map(alive, group.pids))
    assert left_behind() == set()


@needs_anonymous_memory
def test_ranks_in_a_sum_end_with_the_process_that_started_them(tmp_path, left_behind):
    program = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from areno.engine.parallel.workers import WorkerGroup\n"
        "from tests.engine.parallel.objects import members\n"
        "group = WorkerGroup(members(Path(sys.argv[1]), 2))\n"
        "group.call('join', 'meet', 2)\n"
        "threading.Timer(0.5, lambda: print(*group.pids, flush=True)).start()\n"
        "group.call('add_up_for_ever')\n"
    )
    parent = start_text(program, tmp_path, tmp_path)
    pids = list(map(int, parent.stdout.readline().split()))
    assert len(pids) == 2
    assert all("areno-memory" in Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))
    assert left_behind() == set()
