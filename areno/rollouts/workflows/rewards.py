"""Awaitable reward functions for workflows. The functions run in worker processes, with a timeout."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from areno.cache_folder import ScratchFolder
from areno.config.hooks import named_object
from areno.cores import usable_cores
from areno.errors import RewardError, UsageError
from areno.observability import tracing
from areno.rewards import RewardRunner
from areno.rollouts.workflows.pickling import name_of, pickled
from areno.types import RewardParts, RewardRecord

RewardFn = Callable[..., Any] | str

_GIVEN = ("prompt", "completions", "prompt_ids", "completion_ids")
_FILE = """from areno.rollouts.workflows.pickling import RewardCall

reward_fn = RewardCall({sent!r})
"""


class AsyncReward:
    """A reward function with a timeout.

    A worker process runs one call at a time. If a call times out, its process is killed and replaced. If a call times out or
    its process dies, the call is retried. If the function raises, the call is not retried.

    Args:
        reward_fn: a function or coroutine function, or its name (``package.module.fn`` or ``file.py:fn``). Called with
            ``(prompt, completions, prompt_ids, completion_ids, **data)``. Returns a number or a dictionary of named parts.
        timeout_seconds: timeout of a call.
        max_workers: number of concurrent calls; None: half of the usable cores.
        max_retries: maximum number of retries of a call.
        weights: weight of each named reward part; None: all weights are 1.

    Raises:
        UsageError: the function cannot be found or pickled, or ``max_workers`` is below 1.
    """

    def __init__(
        self,
        reward_fn: RewardFn,
        *,
        timeout_seconds: float = 15.0,
        max_workers: int | None = None,
        max_retries: int = 3,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        workers = max(usable_cores() // 2, 1) if max_workers is None else max_workers
        if workers < 1:
            raise UsageError(
                f"max_workers must be at least 1, got {workers}; omit max_workers to use half of the CPU cores"
            )
        sent: bytes | str
        if isinstance(reward_fn, str):
            named_object(reward_fn, option="reward_fn")  # so that an invalid name fails at once
            self.name = sent = reward_fn
        else:
            self.name, sent = name_of(reward_fn), pickled(reward_fn, "reward_fn")
        # The runner gets the function as a file, so that workers load it before the timeout starts.
        self._folder = ScratchFolder("reward")
        self._file = f"{self._folder.name}/reward.py"
        Path(self._file).write_text(_FILE.format(sent=sent), encoding="utf-8")
        self._parts, self._timeout_s, self._retries = RewardParts(weights), timeout_seconds, max_retries
        self._idle: list[RewardRunner] = []  # processes are started on demand
        self._threads = ThreadPoolExecutor(workers, "areno-reward-call")
        self._closed = False

    async def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], /, **data: Any
    ) -> float:
        """Return the reward. If ``reward_fn`` returns a dictionary of parts, the reward is a :class:`WeightedReward`.

        A field of ``data`` is ignored if another argument has the same name.

        Raises:
            RewardError: the function raised an error or returned a number that is not finite, or each of the
                ``max_retries + 1`` attempts timed out or crashed the worker process.
        """
        record = RewardRecord(
            prompt=prompt,
            completion=completions,
            tokens=completion_ids,
            source_record={name: value for name, value in data.items() if name not in _GIVEN},
            metadata={"prompt_ids": prompt_ids},
        )
        async with tracing.atrace_session_phase("reward"):
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._score, record)

    def _score(self, record: RewardRecord) -> float:
        try:
            runner = self._idle.pop()
        except IndexError:
            limits: dict[str, Any] = {"timeout_s": self._timeout_s, "workers": 1, "retries": 0}
            runner = RewardRunner(path=self._file, on_error="drop", parts=self._parts, **limits)
        try:
            for attempt in range(self._retries + 1):
                outcome = runner.run([record])[0]
                if outcome.value is not None:
                    return outcome.value
                if not outcome.lost or attempt == self._retries or self._closed:
                    break
            times = f" ({attempt + 1} times)" if attempt else ""
            raise RewardError(
                f"reward function {self.name} failed{times}: {outcome.error}\n  prompt: {record.prompt[-200:]!r}\n"
                f"  completion: {record.completion[:200]!r}"
            )
        finally:
            if self._closed:
                runner.close()
            else:
                self._idle.append(runner)

    def close(self) -> None:
        """Close idle workers now, and busy workers after their call."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._idle:
            self._idle.pop().close()
        self._folder.cleanup()


def as_reward_call(reward_fn: RewardFn | AsyncReward) -> AsyncReward:
    """Wrap a reward function in an :class:`AsyncReward`. An :class:`AsyncReward` is returned unchanged."""
    return reward_fn if isinstance(reward_fn, AsyncReward) else AsyncReward(reward_fn)
