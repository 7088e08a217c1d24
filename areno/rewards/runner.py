"""Runs reward functions in parallel, with a deadline per record. A failed record never gets a reward.

Functions from a file run in worker processes. Each process imports the file once, before the first rollout.

A worker runs a plain function on one record at a time. When a record exceeds its deadline, the worker's process is killed.

A worker runs a coroutine function on many records at once, in an event loop. The worker cancels each call at its deadline. If a
call blocks the event loop past the deadline, the worker is replaced. The records that were running in this worker are then
retried one at a time, so that only the blocking record fails.
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
from areno.rewards.worker import Message, describe_error, is_async, source_file, timeout_text
from areno.rewards.worker_pool import RewardProcess, RewardThread, WorkerPool, WorkerSlot
from areno.types import RewardParts, RewardRecord

logger = logging.getLogger(__name__)

IMPORT_TIMEOUT_S = 120.0
# An event loop enforces deadlines itself; if a record takes this much longer, a call blocks the loop.
_ASYNC_GRACE_S = 1.0
_MAX_WAIT_S = 60.0
_MAX_DEFAULT_WORKERS = 8
_PREVIEW_CHARS = 200
_CHUNK_WORK_S = 0.002

OnError = Literal["stop", "drop"]


@dataclass(slots=True)
class RewardOutcome:
    """The result of one record. ``value`` is finite, or None if the record failed. ``error`` is the reason for the failure."""

    value: float | None
    error: str | None
    seconds: float  # duration of the call
    lost: bool = False  # whether the worker was replaced, because it exceeded the deadline or died


class RewardRunner:
    """Runs one reward function on batches of records.

    Args:
        reward_fn: a plain function, which runs in threads, or a coroutine function, which runs in the event loop of one
            thread. A thread cannot be killed. If a plain function hangs, its thread is abandoned at the deadline.
        path: ``file.py`` or ``file.py:function``, instead of ``reward_fn``. The function runs in processes, which can be
            killed.
        timeout_s: deadline per record, in seconds from the start of the call.
        workers: number of processes or threads; None: one per CPU core, at most 8.
        on_error: what happens if a record fails: ``stop`` raises an error, and ``drop`` returns an outcome without a value.
        retries: maximum number of retries of a record whose worker died, or did not start to score the record
            within ``timeout_s``.
        memory_gb: memory limit of each worker process of a reward file in GiB (``RLIMIT_DATA``); None: unlimited.
        parts: object that computes the weighted sum of reward parts, and checks that all records have the same parts. Pass one
            object to all runners of the same function, so that the check covers the records of all runners. None: the weight
            of each part is 1.

    Raises:
        UsageError: neither or both of ``reward_fn`` and ``path`` are set, or a value is out of range.
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
            raise UsageError(
                "a reward runner needs exactly one source; set either a reward function or a reward "
                "file (--reward-fn-path)"
            )
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
        self._pool = WorkerPool(spawn, size)

    def start(self) -> None:
        """Wait until the workers have imported the reward file. Raises RewardError if a worker cannot import it."""
        with self._lock:
            batch = self._open([])
            while not all(slot.ready for slot in self._pool.slots):
                self._step(batch)

    def run(self, records: list[RewardRecord]) -> list[RewardOutcome]:
        """Score records, and return the outcomes in the order of the records.

        Raises:
            RewardError: the function cannot be imported, or a record failed and ``on_error`` is ``stop``. The message
                contains the function, the record and the cause.
        """
        with self._lock:
            batch = self._open(records)
            try:
                while batch.unfinished:
                    self._step(batch)
            finally:
                for slot in self._pool.slots:
                    if slot.running or slot.waiting:
                        self._pool.replace(slot.position)
            outcomes = [outcome for outcome in batch.outcomes if outcome is not None]
            for index, outcome in enumerate(outcomes):  # missing parts are known only when all records are scored
                if outcome.value is not None and (problem := self._parts.problem(outcome.value)):
                    self._fail(batch, index, problem, outcome.seconds)
            return [outcome for outcome in batch.outcomes if outcome is not None]

    def close(self) -> None:
        """Stop the workers. The runner cannot be used afterwards."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._pool.close()

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, records: list[RewardRecord]) -> _RewardBatch:
        if self._closed:
            raise RewardError(f"reward function {self.name}: the runner is closed; create a new RewardRunner")
        batch = _RewardBatch(records)
        while self._receive(batch, 0.0):
            pass  # replaces idle workers that have died since the last batch
        for index, record in enumerate(records):
            try:
                batch.payloads.append(self._pool.slots[0].worker.payload(record))
            except Exception as error:
                batch.payloads.append(None)
                self._fail(batch, index, f"the record cannot be sent to a worker: {describe_error(error, '')}", 0.0)
            else:
                batch.queue.append(index)
        return batch

    def _step(self, batch: _RewardBatch) -> None:
        for slot in self._pool.slots:
            if slot.idle and (chunk := batch.take(slot, len(self._pool.slots))):
                slot.waiting, slot.last_activity = chunk, time.monotonic()
                slot.worker.submit([(index, batch.payloads[index]) for index in chunk])
        timeout_s = self._time_to_deadline()
        while self._receive(batch, timeout_s):
            timeout_s = 0.0
            if any(slot.idle for slot in self._pool.slots):
                return  # assign records first; deadlines are checked once no message is left
        self._expire(batch)

    def _receive(self, batch: _RewardBatch, timeout_s: float) -> bool:
        received = False
        for slot, message in self._pool.receive(timeout_s):
            received = True
            slot.last_activity = time.monotonic()
            self._handle(batch, slot, message)
        return received

    def _handle(self, batch: _RewardBatch, slot: WorkerSlot, message: Message) -> None:
        kind, *values = message
        if kind == "ready" and not slot.ready:
            slot.ready, slot.is_async = True, values[0]
        elif kind == "broken" and not slot.ready:
            self._fail_import(slot, values[0])
        elif kind == "died":
            self._handle_loss(batch, slot, values[0])
        elif kind == "start" and values[0] in slot.waiting:
            slot.waiting.remove(values[0])
            slot.running[values[0]] = slot.last_activity
        elif kind in ("value", "error") and values[0] in slot.running:
            index, result, batch.last_call_s = values
            del slot.running[index]
            if kind == "error":
                self._fail(batch, index, result, batch.last_call_s)
            else:
                batch.finish(index, RewardOutcome(self._parts.weigh(result), None, batch.last_call_s))
        else:
            self._handle_loss(
                batch, slot, f"its worker process was stopped because it sent an unexpected message: {message!r:.80}"
            )

    def _time_to_deadline(self) -> float:
        now = time.monotonic()
        deadlines = [self._deadline(slot) for slot in self._pool.slots if not slot.idle]
        return min(max(min(deadlines, default=now) - now, 0.0), _MAX_WAIT_S)

    def _deadline(self, slot: WorkerSlot) -> float:
        if not slot.ready:
            return slot.last_activity + IMPORT_TIMEOUT_S
        started = min(slot.running.values(), default=slot.last_activity)
        return started + self.timeout_s + (_ASYNC_GRACE_S if slot.is_async else 0.0)

    def _expire(self, batch: _RewardBatch) -> None:
        now = time.monotonic()
        for slot in list(self._pool.slots):
            if slot.idle or self._deadline(slot) > now:
                continue
            if not slot.ready:
                reason = f"the import takes more than {IMPORT_TIMEOUT_S:g} s; move slow code from the module into the function"
                self._fail_import(slot, reason)
            self._handle_loss(batch, slot, timeout_text(self.timeout_s), late=bool(slot.running))

    def _fail_import(self, slot: WorkerSlot, reason: str) -> NoReturn:
        self._pool.replace(slot.position)  # a later attempt imports the file again
        raise RewardError(f"reward function {self.name} cannot be imported: {reason}")

    def _handle_loss(self, batch: _RewardBatch, slot: WorkerSlot, reason: str, late: bool = False) -> None:
        """Replace a worker that hangs or died, and requeue its waiting records.

        If the worker was running several records, all of them are retried. A single record fails if it exceeded its deadline
        (``late``) or has no retry left; otherwise, it is retried.
        """
        if not slot.ready:
            self._fail_import(slot, reason)
        self._pool.replace(slot.position)
        # If nothing was running, the worker died between two records; blaming the next record guarantees progress.
        suspects = list(slot.running) or slot.waiting[:1]
        batch.queue.extendleft(index for index in reversed(slot.waiting) if index not in suspects)
        if len(suspects) > 1:
            batch.alone.extend(suspects)
            return
        for index in suspects:
            batch.losses[index] += not late
            if not late and batch.losses[index] <= self._retries:
                logger.warning("reward worker replaced; record %d is retried: %s", index + 1, reason)
                batch.alone.append(index)
                continue
            times = f" ({batch.losses[index]} times)" if batch.losses[index] > 1 else ""
            started = slot.running.get(index)
            seconds = 0.0 if started is None else time.monotonic() - started
            self._fail(batch, index, reason + times, seconds, lost=True)
        if not suspects:
            logger.warning("idle reward worker replaced: %s", reason)

    def _fail(self, batch: _RewardBatch, index: int, reason: str, seconds: float, lost: bool = False) -> None:
        batch.finish(index, RewardOutcome(None, reason, seconds, lost))
        if self.on_error == "stop":
            raise RewardError(self._message(batch.records[index], index, reason))

    def _message(self, record: RewardRecord, index: int, reason: str) -> str:
        description = describe_record(record)
        failed = f"the answer with {description}" if description else f"record {index + 1} of the batch"
        reference = f"  reference answer: {_shorten(record.answer)}\n" if record.answer is not None else ""
        return (
            f"reward function {self.name} failed on {failed}: {reason}\n"
            f"  prompt: {_shorten(record.prompt)}\n"
            f"{reference}"
            f"  completion: {_shorten(record.completion)}\n"
            "Make the function return a finite number for this record, or drop failing samples with "
            "--on-reward-error drop."
        )


def describe_record(record: RewardRecord) -> str:
    """Describe a record in messages, as ``prompt_index P, sample_index S``. Empty if the indices are unknown."""
    return ", ".join(
        f"{key} {record.metadata[key]}" for key in ("prompt_index", "sample_index") if key in record.metadata
    )


class _RewardBatch:
    """The records of one call of :meth:`RewardRunner.run`, and their progress."""

    def __init__(self, records: list[RewardRecord]) -> None:
        self.records = records
        self.payloads: list[Any] = []
        self.outcomes: list[RewardOutcome | None] = [None] * len(records)
        self.unfinished = len(records)
        self.queue: deque[int] = deque()
        self.alone: deque[int] = deque()  # records that may have blocked an event loop, and records of a lost worker
        self.losses = Counter[int]()  # record -> number of workers lost while running it
        self.last_call_s: float | None = None  # duration of the latest call

    def finish(self, index: int, outcome: RewardOutcome) -> None:
        self.outcomes[index] = outcome
        self.unfinished -= 1

    def take(self, slot: WorkerSlot, slots: int) -> list[int]:
        if self.alone:
            return [self.alone.popleft()]
        if slot.is_async:
            size = -(-len(self.records) // slots)
        elif self.last_call_s is None:
            size = 1
        else:
            # Batch short calls up to 2 ms of work, but leave enough records for the other workers.
            size = max(1, min(int(_CHUNK_WORK_S / max(self.last_call_s, 1e-6)), len(self.queue) // (2 * slots)))
        return [self.queue.popleft() for _ in range(min(size, len(self.queue)))]


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _PREVIEW_CHARS else f"{text[: _PREVIEW_CHARS // 2]} … {text[-_PREVIEW_CHARS // 2 :]}"
