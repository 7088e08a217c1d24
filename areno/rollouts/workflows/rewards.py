"""Reward functions for workflows: awaitable, in processes that are killed at a deadline."""

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
from areno.rollouts.workflows.sending import name_of, pickled
from areno.types import RewardParts, RewardRecord

RewardFn = Callable[..., Any] | str

_GIVEN = ("prompt", "completions", "prompt_ids", "completion_ids")
_FILE = """from areno.rollouts.workflows.sending import RewardCall

reward_fn = RewardCall({sent!r})
"""


class AsyncReward:
    """A reward function with a deadline.

    Each call has a worker process to itself, which is killed and replaced when the function is late. A function that is
    late or dies with its process is called again; one that raises is not, because it would raise again. What fails for
    good is an error and never a reward of 0.

    Args:
        reward_fn: ``(prompt, completions, prompt_ids, completion_ids, **data) -> float``, or a dictionary of named parts, or
            its name (``package.module.fn`` or ``file.py:fn``); may be a coroutine function.
        timeout_seconds: deadline of a call.
        max_workers: calls at the same time; None takes half of the CPUs.
        max_retries: how often a lost call is repeated.
        weights: of the parts of a reward, by name; None counts each as it is.

    Raises:
        UsageError: the function is not to be found, or cannot be sent to another process; or there are no workers.
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
            raise UsageError(f"max_workers must be at least 1, got {workers}; None takes half of the CPUs")
        sent: bytes | str
        if isinstance(reward_fn, str):
            named_object(reward_fn, option="reward_fn")  # say now what is wrong with it
            self.name = sent = reward_fn
        else:
            self.name, sent = name_of(reward_fn), pickled(reward_fn, "reward_fn")
        # As a file, so that workers load the function before a deadline runs.
        self._folder = ScratchFolder("reward")
        self._file = f"{self._folder.name}/reward.py"
        Path(self._file).write_text(_FILE.format(sent=sent), encoding="utf-8")
        self._parts, self._timeout_s, self._retries = RewardParts(weights), timeout_seconds, max_retries
        self._idle: list[RewardRunner] = []  # processes are started when they are first needed
        self._threads = ThreadPoolExecutor(workers, "areno-reward-call")
        self._closed = False

    async def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], /, **data: Any
    ) -> float:
        """The reward, with any parts; fields of the row ``data`` that are called like the other arguments are left out.

        Raises RewardError: the function raised, returned no finite number, or was lost as often as there were retries.
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
            again = f" ({attempt + 1} times)" if attempt else ""
            raise RewardError(
                f"reward function {self.name} failed{again}: {outcome.error}\n  prompt: {record.prompt[-200:]!r}\n"
                f"  completion: {record.completion[:200]!r}"
            )
        finally:
            if self._closed:
                runner.close()
            else:
                self._idle.append(runner)

    def close(self) -> None:
        """End the idle workers now, and those that are busy after their call."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._idle:
            self._idle.pop().close()
        self._folder.cleanup()


def as_reward_call(reward_fn: RewardFn | AsyncReward) -> AsyncReward:
    """The function with a deadline, unless it has one already."""
    return reward_fn if isinstance(reward_fn, AsyncReward) else AsyncReward(reward_fn)
