"""Reward functions under control: run in parallel, each record with its own deadline, no error turned into a number.

Functions from a file run in worker processes that import it once, ahead of the first rollout, and that are killed when
a record takes too long. A plain function has one record per worker. A coroutine function has many at once in each
worker's event loop; if that loop gets stuck, its unfinished records run again one by one, so that only the guilty one
fails.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn

from areno.cores import usable_cores
from areno.errors import RewardError, UsageError
from areno.rewards.lanes import Lane, Pool, RewardProcess, RewardThread
from areno.rewards.worker import Message, describe_error, is_async, source_file, timeout_text
from areno.types import RewardParts, RewardRecord

logger = logging.getLogger(__name__)

IMPORT_TIMEOUT_S = 120.0
_ASYNC_GRACE_S = 1.0  # the event loop enforces the deadline itself; past this it must be stuck
_LONGEST_WAIT_S = 60.0
_MAX_DEFAULT_WORKERS = 8
_SHOWN_CHARS = 200
_CHUNK_WORK_S = 0.002

OnError = Literal["stop", "drop"]


@dataclass(slots=True)
class RewardOutcome:
    """What became of one record: a finite ``value``, or None and the ``error``."""

    value: float | None
    error: str | None
    seconds: float  # the function's time
    lost: bool = False  # the function neither returned nor raised: it was too late, or its process died


class RewardRunner:
    """Runs one reward function over batches of records.

    Args:
        reward_fn: a Python callable, plain or coroutine function. It runs in threads (coroutines in one event loop): a
            call that hangs is given up at its deadline, but its thread cannot be killed.
        path: ``file.py`` or ``file.py:function`` instead; runs in processes that can be killed.
        timeout_s: deadline per record in seconds, from when its call starts.
        workers: how many processes or threads; default one per CPU, 8 at most.
        on_error: ``stop`` raises at the first record that fails, ``drop`` gives it an outcome without a value.
        retries: how often a record runs again whose worker process died, or did not begin with it in time.
        memory_gb: most data of each process of a reward file, in GiB; None sets no limit.
        parts: weighs the parts of rewards; several runners of one function share it. None gives each part the weight 1.

    Raises:
        UsageError: not exactly one of ``reward_fn`` and ``path``, or a value out of range.
    """

    def __init__(
        self,
        reward_fn: Callable[[RewardRecord], Any] | None = None,
        *,
        path: str | None = None,
        timeout_s: float,
        workers: int | None = None,
        on_error: OnError = "stop",
        retries: int = 1,
        memory_gb: float | None = None,
        parts: RewardParts | None = None,
    ) -> None:
        if (reward_fn is None) == (path is None):
            raise UsageError("a reward needs either a function or a file (--reward-fn-path), and not both")
        if not timeout_s > 0:
            raise UsageError(f"--reward-timeout-s must be above 0, got {timeout_s}")
        if workers is not None and workers < 1:
            raise UsageError(f"reward workers must be at least 1, got {workers}")
        if on_error not in ("stop", "drop"):
            raise UsageError(f"reward on_error must be `stop` or `drop`, got {on_error!r}")
        self.timeout_s = timeout_s
        self.on_error = on_error
        self._retries = retries
        self._parts = parts or RewardParts()
        self._lock = threading.Lock()
        self._closed = False
        size = workers or min(usable_cores(), _MAX_DEFAULT_WORKERS)
        spawn: Callable[[], RewardProcess | RewardThread]
        if reward_fn is None:
            self.name = str(path)
            memory_bytes = None if memory_gb is None else int(memory_gb * 2**30)
            settings = {"path": path, "timeout_s": timeout_s, "memory_bytes": memory_bytes}
            spawn = partial(RewardProcess, settings)
        else:
            self.name = f"{getattr(reward_fn, '__qualname__', repr(reward_fn))} in {source_file(reward_fn) or 'Python'}"
            size = 1 if is_async(reward_fn) else size
            spawn = partial(RewardThread, reward_fn, timeout_s)
        self._pool = Pool(spawn, size)

    def start(self) -> None:
        """Wait until the reward file is imported, so that a mistake in it (RewardError) shows before the first rollout."""
        with self._lock:
            batch = self._open([])
            while not all(lane.ready for lane in self._pool.lanes):
                self._step(batch)

    def run(self, records: list[RewardRecord]) -> list[RewardOutcome]:
        """Score records; outcomes come in their order.

        Raises:
            RewardError: the function cannot be imported, or, with ``on_error="stop"``, a record failed; the message
                names the function, the cause with its line, and the record.
        """
        with self._lock:
            batch = self._open(records)
            try:
                while batch.unfinished:
                    self._step(batch)
            finally:
                for lane in self._pool.lanes:
                    if lane.running or lane.waiting:
                        self._pool.replace(lane.position)
            outcomes = [outcome for outcome in batch.outcomes if outcome is not None]
            for index, outcome in enumerate(outcomes):  # only with all of them is it known which part one lacks
                if outcome.value is not None and (problem := self._parts.problem(outcome.value)):
                    self._fail(batch, index, problem, outcome.seconds)
            return [outcome for outcome in batch.outcomes if outcome is not None]

    def close(self) -> None:
        """End the workers; the runner cannot be used afterwards."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._pool.close()

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, records: list[RewardRecord]) -> _Batch:
        if self._closed:
            raise RewardError(f"reward function {self.name}: its runner is closed; make a new RewardRunner")
        batch = _Batch(records)
        while self._take_in(batch, 0.0):
            pass  # idle workers that died since the last batch are replaced before they are given records
        for index, record in enumerate(records):
            try:
                batch.payloads.append(self._pool.lanes[0].worker.payload(record))
            except Exception as error:
                batch.payloads.append(None)
                self._fail(batch, index, f"the record cannot be sent to a worker: {describe_error(error, '')}", 0.0)
            else:
                batch.queue.append(index)
        return batch

    def _step(self, batch: _Batch) -> None:
        """Hand out work, take in what has arrived, and act on deadlines."""
        for lane in self._pool.lanes:
            if lane.idle and (chunk := batch.take(lane, len(self._pool.lanes))):
                lane.waiting, lane.touched = chunk, time.monotonic()
                lane.worker.deliver([(index, batch.payloads[index]) for index in chunk])
        timeout_s = self._patience()
        while self._take_in(batch, timeout_s):
            timeout_s = 0.0
            if any(lane.idle for lane in self._pool.lanes):
                return  # work for it comes first; deadlines are looked at as soon as no message is left
        self._expire(batch)

    def _take_in(self, batch: _Batch, timeout_s: float) -> bool:
        """Handle the messages that have arrived; False if there was none within ``timeout_s``."""
        any_came = False
        for lane, message in self._pool.receive(timeout_s):
            any_came = True
            lane.touched = time.monotonic()
            self._handle(batch, lane, message)
        return any_came

    def _handle(self, batch: _Batch, lane: Lane, message: Message) -> None:
        kind, *values = message
        if kind == "ready" and not lane.ready:
            lane.ready, lane.is_async = True, values[0]
        elif kind == "broken" and not lane.ready:
            self._refuse(lane, values[0])
        elif kind == "died":
            self._lose(batch, lane, values[0])
        elif kind == "start" and values[0] in lane.waiting:
            lane.waiting.remove(values[0])
            lane.running[values[0]] = lane.touched
        elif kind in ("value", "error") and values[0] in lane.running:
            index, result, batch.pace_s = values
            del lane.running[index]
            if kind == "error":
                self._fail(batch, index, result, batch.pace_s)
            else:
                batch.finish(index, RewardOutcome(self._parts.weigh(result), None, batch.pace_s))
        else:
            self._lose(batch, lane, f"its worker reported {message!r:.80} out of turn, and was stopped")

    def _patience(self) -> float:
        """Seconds until the next deadline of any lane, as far as a system call can wait."""
        now = time.monotonic()
        deadlines = [self._deadline(lane) for lane in self._pool.lanes if not lane.idle]
        return min(max(min(deadlines, default=now) - now, 0.0), _LONGEST_WAIT_S)

    def _deadline(self, lane: Lane) -> float:
        if not lane.ready:
            return lane.touched + IMPORT_TIMEOUT_S
        started = min(lane.running.values(), default=lane.touched)
        return started + self.timeout_s + (_ASYNC_GRACE_S if lane.is_async else 0.0)

    def _expire(self, batch: _Batch) -> None:
        now = time.monotonic()
        for lane in list(self._pool.lanes):
            if lane.idle or self._deadline(lane) > now:
                continue
            if not lane.ready:
                self._refuse(lane, f"no end within {IMPORT_TIMEOUT_S:g} s; move slow work out of the top of the file")
            self._lose(batch, lane, timeout_text(self.timeout_s), late=bool(lane.running))

    def _refuse(self, lane: Lane, reason: str) -> NoReturn:
        self._pool.replace(lane.position)  # a later attempt imports the file anew
        raise RewardError(f"reward function {self.name} cannot be imported: {reason}")

    def _lose(self, batch: _Batch, lane: Lane, reason: str, late: bool = False) -> None:
        """A lane hangs or died: replace it, blame the record that it was running, give back the others."""
        if not lane.ready:
            self._refuse(lane, reason)
        self._pool.replace(lane.position)
        # Nothing running means that it died between two records; charging the next one ensures progress.
        suspects = list(lane.running) or lane.waiting[:1]
        batch.queue.extendleft(index for index in reversed(lane.waiting) if index not in suspects)
        if len(suspects) > 1:
            batch.alone.extend(suspects)
            return
        for index in suspects:
            batch.losses[index] += not late
            if not late and batch.losses[index] <= self._retries:
                logger.warning("a reward worker was replaced, record %d runs again: %s", index + 1, reason)
                batch.alone.append(index)
                continue
            again = f" ({batch.losses[index]} times)" if batch.losses[index] > 1 else ""
            started = lane.running.get(index)
            seconds = 0.0 if started is None else time.monotonic() - started
            self._fail(batch, index, reason + again, seconds, lost=True)
        if not suspects:
            logger.warning("an idle reward worker was replaced: %s", reason)

    def _fail(self, batch: _Batch, index: int, reason: str, seconds: float, lost: bool = False) -> None:
        batch.finish(index, RewardOutcome(None, reason, seconds, lost))
        if self.on_error == "stop":
            raise RewardError(self._message(batch.records[index], index, reason))

    def _message(self, record: RewardRecord, index: int, reason: str) -> str:
        place = place_of(record)
        return (
            f"reward function {self.name} failed on record {index + 1}{f' ({place})' if place else ''}: {reason}\n"
            f"  prompt: {_shorten(record.prompt)}\n"
            f"  completion: {_shorten(record.completion)}\n"
            "Make the function return a finite number for this record, or leave failing samples out of training with "
            "--on-reward-error drop."
        )


def place_of(record: RewardRecord) -> str:
    """Prompt and sample of a record, as messages name it; empty where they are not known."""
    return ", ".join(
        f"{key} {record.metadata[key]}" for key in ("prompt_index", "sample_index") if key in record.metadata
    )


class _Batch:
    """The records of one call: what is queued, what must run alone, what is finished."""

    def __init__(self, records: list[RewardRecord]) -> None:
        self.records = records
        self.payloads: list[Any] = []
        self.outcomes: list[RewardOutcome | None] = [None] * len(records)
        self.unfinished = len(records)
        self.queue: deque[int] = deque()
        self.alone: deque[int] = deque()  # suspects of a stuck event loop, and records of a lost worker
        self.losses = Counter[int]()  # by record: workers that were lost with it
        self.pace_s: float | None = None  # how long the latest record took

    def finish(self, index: int, outcome: RewardOutcome) -> None:
        """Note the outcome of a record."""
        self.outcomes[index] = outcome
        self.unfinished -= 1

    def take(self, lane: Lane, lanes: int) -> list[int]:
        """The next records for an idle lane: a share for an event loop, few at a time for a plain function."""
        if self.alone:
            return [self.alone.popleft()]
        if lane.is_async:
            size = -(-len(self.records) // lanes)
        elif self.pace_s is None:
            size = 1
        else:
            # Tiny calls travel together, as many as make up a few milliseconds, and never so many that others run dry.
            size = max(1, min(int(_CHUNK_WORK_S / max(self.pace_s, 1e-6)), len(self.queue) // (2 * lanes)))
        return [self.queue.popleft() for _ in range(min(size, len(self.queue)))]


def _shorten(text: str) -> str:
    text = text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS // 2]} … {text[-_SHOWN_CHARS // 2 :]}"
    return repr(text)
