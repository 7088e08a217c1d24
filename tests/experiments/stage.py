"""Shared by tests of episodes: settings, a real engine, and a simulated engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import areno  # noqa: F401  (before torch)
from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.engine.rollout.load import EngineLoad
from areno.engine.train.optimizer import OptimizerOptions
from areno.types import Request, RolloutResult, RolloutSequence


@dataclass
class Generation:
    """Fields of `gconfig`, with small values."""

    n_samples: int = 1
    max_new_tokens: int = 8
    min_new_tokens: int = 0
    max_tokens: int = 256
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = 100000000
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = True
    skip_special_tokens: bool = True
    stop: list[str] | None = None
    frequency_penalty: float = 0.0
    use_beam_search: bool = False


class LoopEngine:
    """A real engine that reports the version of its rollout loop, as a process that only generates does."""

    def __init__(self, engine: Engine) -> None:
        self.inner = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def version(self) -> int:
        return self.inner.loop.version


@contextmanager
def open_engine(checkpoint: Path, **config: Any) -> Iterator[LoopEngine]:
    engine = Engine(
        str(checkpoint),
        EngineConfig(trains="nothing", optimizer=OptimizerOptions(), kv_cache_tokens=20000, decode="eager", **config),
    )
    try:
        yield LoopEngine(engine)
    finally:
        engine.close()


@dataclass
class _Running:
    future: Future[RolloutResult]
    left: int
    versions: list[int] = field(default_factory=list)


class TickEngine:
    """Generates one token per tick for each request; a request's first prompt token says how many.

    A thread ticks as fast as possible: the test sets the number of events, their order depends on the machine.
    """

    class _Tokenizer:
        eos_token_id = 1

    tokenizer = _Tokenizer()
    eos_ids = frozenset({1})
    context_length = None

    def __init__(self) -> None:
        self.version = 0
        self.ticks = 0
        self._lock = threading.Lock()
        self._running: list[_Running] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()

    def submit(self, requests: list[Request]) -> list[Future[RolloutResult]]:
        futures = []
        for request in requests:
            running = _Running(Future(), request.prompt_tokens[0])
            running.future.set_running_or_notify_cancel()
            with self._lock:
                self._running.append(running)
            futures.append(running.future)
        return futures

    def cancel(self, future: Future[RolloutResult]) -> None:
        with self._lock:
            mine = [one for one in self._running if one.future is future]
            self._running = [one for one in self._running if one.future is not future]
        for one in mine:
            self._answer(one, "abort")

    def load(self) -> EngineLoad:
        with self._lock:
            return EngineLoad(0, len(self._running), 0, 0, self.ticks, 0, 0, 0, 0, 0)

    def set_version(self, version: int) -> None:
        with self._lock:
            self.version = version

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _tick(self) -> None:
        while not self._stop.wait(0.0005):
            with self._lock:
                self.ticks += len(self._running)
                for one in self._running:
                    one.versions.append(self.version)
                    one.left -= 1
                done = [one for one in self._running if one.left <= 0]
                self._running = [one for one in self._running if one.left > 0]
            for one in done:
                self._answer(one, "length")

    def _answer(self, one: _Running, finish: Any) -> None:
        length = len(one.versions)
        sequence = RolloutSequence([7] * length, [-1.0] * length, finish, versions=list(one.versions))
        one.future.set_result(RolloutResult([sequence]))
