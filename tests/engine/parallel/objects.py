"""Small objects for worker groups, which work, wait, fail or die on demand."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from areno.engine.parallel import channels
from areno.engine.parallel.channels import RankGroup, SharedGroup, meet
from areno.engine.parallel.layout import Layout
from areno.engine.parallel.rank_context import RankContext
from areno.engine.parallel.rendezvous import FolderRendezvous
from areno.engine.train.optimizer import GradientStats, OptimizerOptions
from areno.engine.train.sharded import ZeroAdamW

CPU = torch.device("cpu")


class Counter:
    """Counts, in its own process."""

    def __init__(self, rank: int, send) -> None:
        self.rank, self.send, self.count = rank, send, 0

    def add(self, amount: int) -> int:
        self.count += amount
        return self.count

    def pid(self) -> int:
        return os.getpid()

    def apply(self, function, value):
        return function(self.rank, value)

    def say(self, text: str) -> None:
        self.send((self.rank, text))

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def die_with_a_child(self) -> None:
        """Be killed while a child process still holds the connection."""
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        self.send(child)
        self.die_on(self.rank)

    def fail_on(self, rank: int, wait: float = 0.0) -> None:
        if self.rank == rank:
            raise ValueError("this rank was told to fail")
        time.sleep(wait)

    def fail_all(self) -> None:
        raise ValueError("all ranks were told to fail")

    def die_on(self, rank: int, number: int = signal.SIGKILL) -> None:
        if self.rank == rank:
            os.kill(os.getpid(), number)
        time.sleep(60)


def make_first(send):
    return Counter(0, send)


def make_second(send):
    return Counter(1, send)


def refuse(send):
    raise RuntimeError("nothing can be made here")


class Member:
    """One of several processes that compute sums, in shared memory if the group is a ``SharedGroup``."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.sums = None

    def join(self, name: str, size: int, kind: type[RankGroup] = SharedGroup) -> None:
        self.group = meet(FolderRendezvous(self.folder), name, self.rank, size, CPU, kind=kind)

    def add_up(self, count: int, rounds: list[list[Tensor]]) -> list[Tensor]:
        """Return this rank's part of each round's sum; ``rounds[round][rank]`` is what a rank adds."""
        self.sums = self.group.reduce_buffer(count, CPU)
        parts = []
        for values in rounds:
            if self.sums is None:
                parts.append(self.group.reduce_scatter(values[self.rank]))
            else:
                self.sums.values.copy_(values[self.rank])
                parts.append(self.sums.part().clone())
        return parts

    def call(self, method: str, values: list[Tensor]) -> Tensor:
        return getattr(self.group, method)(values[self.rank])

    def write_common(self, count: int, dtype: torch.dtype) -> Tensor | None:
        """Fill this rank's part of the shared entries with its number, and return all entries."""
        common = self.group.shared_memory(count * self.group.size, dtype)
        if common is None:
            return None
        common.tensor(self.rank * count, count).fill_(self.rank + 1)
        common.barrier()
        return common.tensor(0, count * self.group.size)

    def opened(self) -> tuple[list[str], list[str]]:
        """Return the shared memory that this process has mapped, and the shared-memory files it holds open."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        files = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink() and file.exists()]
        shared = [line for line in maps if "areno-memory" in line or ("/dev/shm" in line and "KMP" not in line)]
        return shared, [file for file in files if "areno-memory" in file]

    def wait_for_others(self, late: int, seconds: float) -> float:
        """Return the CPU time that a sum takes while another rank is late."""
        sums = self.group.reduce_buffer(64 * self.group.size, CPU)
        began = time.process_time()
        time.sleep(seconds * (self.rank == late))
        sums.part()
        return time.process_time() - began

    def add_up_for_ever(self, dying: int = -1) -> None:
        """Add up until the process is killed; rank ``dying`` kills itself."""
        sums = self.group.reduce_buffer(1 << 20, CPU)
        for count in itertools.count():
            if self.rank == dying and count == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            sums.part()

    def refuse_memory(self) -> None:
        """Act like a system without anonymous shared memory."""
        channels.ANONYMOUS = False

    def learn(
        self, weights: dict[str, Tensor], steps: list[list[dict[str, Tensor]]], config: OptimizerOptions
    ) -> tuple[dict[str, Tensor], list[GradientStats], bool]:
        """Train weights with the gradients of ``steps[step][pass]``; the ranks divide the passes."""
        parameters = {name: nn.Parameter(value.clone()) for name, value in weights.items()}
        peers = RankContext(Layout(dp_size=self.group.size), rank=self.rank, data=self.group)
        optimizer = ZeroAdamW(list(parameters.items()), config, peers)
        found = []
        for step in steps:
            optimizer.zero_grad()
            for gradients in step[self.rank :: self.group.size]:
                sum((parameters[name] * gradient).sum() for name, gradient in gradients.items()).backward()
            found.append(optimizer.collect())
            optimizer.step()
        return {name: p.detach() for name, p in parameters.items()}, found, optimizer._shared_memory is not None


def make_member(folder: Path, rank: int, send) -> Member:
    return Member(folder, rank)


def members(folder: Path, count: int) -> list:
    """Return the factories of a worker group."""
    return [functools.partial(make_member, folder, rank) for rank in range(count)]
