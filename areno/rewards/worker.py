"""The loop of a reward worker. The worker receives records, runs the user's function, and reports rewards or errors.

For a reward file, the loop runs in a separate process (:func:`main`). For a callable, the loop runs in a thread. In a
process, the function runs in the main thread, where timeouts based on ``signal.alarm`` work. Reports are JSON, because a
pickle from untrusted code could execute code in the trainer. This module does not import torch.
"""

import asyncio
import inspect
import json
import math
import numbers
import pickle
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areno.config.hooks import REWARD_HOOK, load_hook
from areno.config.reward_weights import PART_NAME
from areno.errors import RewardError, UsageError
from areno.frames import Frames
from areno.rewards.supervisor import supervised
from areno.types import RewardRecord
from areno.types.reward_parts import PartValues

MAX_CONCURRENT = 64  # concurrent async calls per event loop
MESSAGE_BYTES = 1 << 20  # maximum size of a report
_MAX_ERROR_CHARS = 2000

RewardJob = tuple[int, Any]
Message = list[Any]
"""A report of a worker, which is one of:

- ``["ready", is_async]``: the function was imported.
- ``["broken", text]``: the import failed.
- ``["start", index]``: the worker begins to score a record.
- ``["value", index, reward, seconds]``: the reward of a record, which is a number or a dictionary of parts.
- ``["error", index, text, seconds]``: the record failed.
"""

_MESSAGE_TYPES: dict[Any, set[tuple[type, ...]]] = {
    "ready": {(bool,)},
    "broken": {(str,)},
    "start": {(int,)},
    "value": {(int, float, float), (int, dict, float)},
    "error": {(int, str, float)},
}


def parse_message(body: bytes) -> Message:
    """Parse a report of a worker process. Raises ValueError if the report is invalid."""
    try:
        message = json.loads(body)
        kind, values = message[0], message[1:]
        valid = isinstance(message, list) and tuple(map(type, values)) in _MESSAGE_TYPES[kind]
        if valid and kind == "value":
            as_reward(values[1])
    except (ValueError, LookupError, TypeError, RecursionError, RewardError):
        valid = False
    if not valid or not all(math.isfinite(value) for value in values if isinstance(value, float)):
        raise ValueError(f"{body[:80]!r} has an unknown format")
    return list(message)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling ``function`` returns a coroutine. Supports ``functools.partial`` and callable objects."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def source_file(function: Callable[..., Any]) -> str:
    """Return the file that defines ``function``; empty for built-ins."""
    inner = inspect.unwrap(getattr(function, "func", function))
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    return code.co_filename if code else ""


def describe_error(error: BaseException, source: str) -> str:
    """Describe an error as ``Type: message (file:line)``. The file and the line are those of the last traceback frame in
    ``source``."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    frames = [frame for frame in frames if frame.filename == source] or frames
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return _truncate(f"{type(error).__name__}: {error}") + where


def as_reward(value: Any) -> PartValues:
    """Convert the result of a reward function, which must be a number or a dictionary of numbers, to floats.

    Raises RewardError if the result is invalid.
    """
    if not isinstance(value, Mapping):
        return _as_number(value)
    if not value or not all(isinstance(name, str) and PART_NAME.fullmatch(name) for name in value):
        raise RewardError(
            f"returned a dictionary with the keys {list(value)!r:.80}; return at least one key; each key must start with a "
            "letter or `_` and contain only letters, digits, `_`, `.` and `-`"
        )
    return {name: _as_number(part, f" as the part {name}") for name, part in value.items()}


def _as_number(value: Any, place: str = "") -> float:
    """Convert a number, or a zero-dimensional array or tensor, to a finite float. Raises RewardError if this is impossible."""
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, numbers.Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    shown = repr(value)
    raise RewardError(
        f"returned {shown if len(shown) <= 80 else shown[:80] + '…'} ({type(value).__name__}){place}; "
        "a reward must be a finite number, or a dictionary from part names to finite numbers"
    )


@dataclass(frozen=True, slots=True)
class Scorer:
    """Runs the user's function on jobs and reports the results."""

    function: Callable[[RewardRecord], Any]
    timeout_s: float  # deadline per record; enforced by this class for coroutine functions, by the runner for others
    frames: Frames  # connection for the reports
    load: Callable[[Any], RewardRecord]  # decodes the payload of a job

    def serve(self, receive: Callable[[], Sequence[RewardJob] | None]) -> None:
        """Score jobs until ``receive`` returns None.

        If the reward function is a coroutine function, many jobs are scored concurrently. Otherwise, one job is scored at a
        time.
        """
        concurrent = is_async(self.function)
        self._report("ready", concurrent)
        if not concurrent:
            while (jobs := receive()) is not None:
                for job in jobs:
                    self._score(*job)
            return
        # One event loop for all jobs, because the function may keep a client session that is bound to the loop.
        with asyncio.Runner() as runner:
            while (jobs := receive()) is not None:
                runner.run(self._score_concurrently(jobs))

    def _score(self, index: int, payload: Any) -> None:
        self._report("start", index)
        started = time.perf_counter()
        result: tuple[str, int, PartValues | str]
        try:
            result = "value", index, as_reward(self.function(self.load(payload)))
        except BaseException as error:
            result = "error", index, self._reason(error)
        self._report(*result, time.perf_counter() - started)

    async def _score_concurrently(self, jobs: Sequence[RewardJob]) -> None:
        slots = asyncio.Semaphore(MAX_CONCURRENT)

        async def score(index: int, payload: Any) -> None:
            async with slots:
                self._report("start", index)
                started = time.perf_counter()
                deadline = asyncio.timeout(self.timeout_s)
                result: tuple[str, int, PartValues | str]
                try:
                    async with deadline:
                        result = "value", index, as_reward(await self.function(self.load(payload)))
                except BaseException as error:
                    result = "error", index, self._reason(error)
                if deadline.expired():  # even if the function caught the cancellation
                    result = "error", index, timeout_text(self.timeout_s)
                self._report(*result, time.perf_counter() - started)

        await asyncio.gather(*(score(*job) for job in jobs))

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, RewardError):
            return _truncate(str(error))
        limited = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
        hint = " (--reward-memory-gb)" if limited and isinstance(error, MemoryError) else ""
        return describe_error(error, source_file(self.function)) + hint

    def _report(self, *message: Any) -> None:
        self.frames.send(json.dumps(message).encode())


def main(settings: dict[str, Any]) -> None:
    """Run a worker process.

    Args:
        settings: ``path`` is ``file.py`` or ``file.py:function``. ``connection`` and ``lifeline`` are file descriptors of
            sockets to the trainer: ``connection`` carries the messages, and the worker is killed when the trainer closes
            ``lifeline``. ``timeout_s`` is the deadline per record. ``memory_bytes`` is the memory limit (``RLIMIT_DATA``);
            None: unlimited.
    """
    frames = supervised(settings["lifeline"], settings["connection"])
    if settings["memory_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (settings["memory_bytes"],) * 2)
    sys.argv = [settings["path"]]

    def receive() -> Sequence[RewardJob] | None:
        try:
            return pickle.loads(frames.receive())
        except EOFError:
            return None

    try:
        function = load_hook(settings["path"], REWARD_HOOK)
    except UsageError as error:
        frames.send(json.dumps(["broken", str(error)]).encode())
        return
    Scorer(function, settings["timeout_s"], frames, pickle.loads).serve(receive)


def timeout_text(timeout_s: float) -> str:
    """Return the error message of a record that exceeded its deadline."""
    return f"no result within {timeout_s:g} s (--reward-timeout-s, reward.timeout_seconds)"


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS] + "…"
