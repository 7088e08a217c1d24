"""What the worker groups of these tests hold: small objects that work, wait, fail or die on demand."""

from __future__ import annotations

import os
import signal
import time


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
