"""Runs an agent on a batch. A failed sample does not affect the other samples.

The agent is called once with the whole batch. Samples without a valid result, for example because the call timed out,
are retried. Each retry is a separate call with its own API key, thread and timeout. Samples that still fail after
``retries`` retries are dropped, and their errors are reported.

An agent runs in a thread, so it can block neither the server nor the trainer. A coroutine that times out is cancelled,
together with the tasks that it started. A sync function cannot be cancelled: if it times out, its API keys are revoked,
but its thread continues.
"""

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from areno.api.agentic.context import AgentContext
from areno.api.agentic.data import AgentBatch, AgentItem, AgentTrajectoryTurn
from areno.api.agentic.samples import AgentSample, make_sample, turns_in
from areno.engine.rollout.counter_rng import derive_seed
from areno.errors import ArenoError, UsageError
from areno.rewards.worker import describe_error, source_file
from areno.rollouts.conversation.agent_server import AgentServer
from areno.rollouts.conversation.spans import LossMaskPolicy

logger = logging.getLogger(__name__)

AgentFn = Callable[[Any, AgentBatch], Any]
Place = tuple[int, int]  # prompt and sample index

GRACE_S = 5.0  # time for a cancelled agent to clean up
MAX_CALLS = 32  # maximum concurrent retries


class AgentCall:
    """One call of an agent. Creating the object starts the call, and :meth:`end` ends it.

    Attributes:
        turns: turns that the agent has returned or yielded so far. The turns are kept if the call fails later.
        error: why the call failed; empty if the call succeeded or is still running.
        done: future that resolves when the call has ended.
    """

    def __init__(self, function: AgentFn, context: AgentContext, batch: AgentBatch, timeout_s: float) -> None:
        self.batch, self.context = batch, context
        self.turns: list[AgentTrajectoryTurn] = []
        self.error = ""
        self.done: Future[None] = Future()
        self._function, self._timeout_s = function, timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._deadline = time.monotonic() + timeout_s
        self._thread = threading.Thread(target=self._run, name="areno-agent", daemon=True)
        self._thread.start()

    @property
    def patience_s(self) -> float:
        """Remaining time to wait for the agent to return, in seconds. Includes a grace period after the timeout."""
        return max(0.0, self._deadline + GRACE_S - time.monotonic())

    def end(self) -> None:
        """End this call of the agent, and revoke the API keys of the call. An async agent that is still running is cancelled.

        A sync agent cannot be cancelled, so its thread continues in the background.
        """
        self.context.close()
        if not self.done.done():
            self.error = self.error or self._late()
            if self._loop is not None and self._task is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                    self._loop.call_soon_threadsafe(self._task.cancel)
        # A sync function that timed out cannot be cancelled.
        self._thread.join(GRACE_S if self.done.done() or self._task is not None else 0.0)
        if self._thread.is_alive():
            logger.warning("an agent could not be cancelled, so its thread is still running (%s)", self.error)

    def _late(self) -> str:
        return f"the agent timed out after {self._timeout_s:g} s (--agent-timeout-s)"

    def _run(self) -> None:
        try:
            returned = None if self._is_async else self._function(self.context, self.batch)
            asyncio.run(self._main(returned))
        except BaseException as error:  # even SystemExit
            self.error = self.error or _reason(error, self._function)
        finally:
            self.done.set_result(None)

    @property
    def _is_async(self) -> bool:
        call = getattr(self._function, "__call__", None)  # noqa: B004  (an object may be an agent)
        return any(
            check(candidate)
            for candidate in (inspect.unwrap(self._function), call)
            for check in (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        )

    async def _main(self, returned: Any) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        deadline = asyncio.timeout(max(0.0, self._deadline - time.monotonic()))
        try:
            async with deadline:
                if self._is_async:
                    returned = self._function(self.context, self.batch)
                await self._take(returned)
        except TimeoutError as error:
            self.error = self._late() if deadline.expired() else _reason(error, self._function)

    async def _take(self, returned: Any) -> None:
        if isinstance(returned, AsyncIterator):
            async with contextlib.aclosing(returned) as parts:  # type: ignore[type-var]
                async for part in parts:
                    self.turns.extend(turns_in(part))
            return
        if inspect.isawaitable(returned):
            returned = await returned
        for part in returned if isinstance(returned, Iterator) else [returned]:
            self.turns.extend(turns_in(part))


def _reason(error: BaseException, function: AgentFn) -> str:
    if isinstance(error, ArenoError):
        return str(error)
    if isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return describe_error(error, source_file(function))


def by_item(returned: Any) -> dict[Place, list[AgentTrajectoryTurn]]:
    """Group an agent's turns by task. Raises AgentError if the agent returned anything other than turns."""
    turns: dict[Place, list[AgentTrajectoryTurn]] = {}
    for turn in turns_in(returned):
        turns.setdefault(turn.item.place, []).append(turn)
    return turns


@dataclass(slots=True)
class CollectedSamples:
    """Samples ordered by prompt and sample index, errors of failed samples, and the number of retries (``rerun``)."""

    samples: list[AgentSample] = field(default_factory=list)
    errors: dict[Place, str] = field(default_factory=dict)
    rerun: int = 0


class AgentRunner:
    """Runs one agent on batches.

    Args:
        function: ``run_agent(ctx, batch)``, sync or async; may return or yield turns.
        policy: loss mask policy, which selects the tokens to train on.
        tokenizer: the model's tokenizer.
        timeout_s: timeout of each call, in seconds.
        retries: maximum number of retries of a failed sample. Each retry is a separate call with only this sample.
    """

    def __init__(
        self, function: AgentFn, policy: LossMaskPolicy, tokenizer: Any, *, timeout_s: float, retries: int = 1
    ) -> None:
        self._function, self._policy, self._tokenizer = function, policy, tokenizer
        self._timeout_s, self._retries = timeout_s, retries

    def collect(self, server: AgentServer, batch: AgentBatch) -> CollectedSamples:
        """Run the agent on a batch. ``server`` is the server of an open rollout session (the session's ``proxy``).

        Raises UsageError if prompt tokens count in the loss (see :class:`LossMaskPolicy`), but the tokenizer cannot map them
        to text.
        """
        samples: dict[Place, AgentSample] = {}
        batches, rerun, attempt = [batch], 0, 0
        while True:
            errors: dict[Place, str] = {}
            for call in self._calls(server, batches, attempt):
                errors |= self._take(call, samples)
            again = [item for item in batch.iter_samples() if item.place in errors]
            if not again or attempt == self._retries:
                return CollectedSamples([samples[place] for place in sorted(samples)], errors, rerun)
            batches, rerun, attempt = [batch.only([item]) for item in again], rerun + len(again), attempt + 1
            logger.warning(
                "retrying %d unfinished samples, one per agent call (retry %d of %d); "
                "the first sample is prompt %d, sample %d: %s",
                *(len(again), attempt, self._retries, *again[0].place, errors[again[0].place]),
            )

    def _calls(self, server: AgentServer, batches: Iterable[AgentBatch], attempt: int) -> Iterator[AgentCall]:
        waiting = deque(batches)
        running: list[AgentCall] = []
        try:
            while waiting or running:
                while waiting and len(running) < MAX_CALLS:
                    batch = waiting.popleft()
                    place = next(batch.iter_samples()).place if attempt else (0, 0)
                    context = AgentContext(server, derive_seed(server.seed, attempt, *place))
                    running.append(AgentCall(self._function, context, batch, self._timeout_s))
                wait([call.done for call in running], min(c.patience_s for c in running), FIRST_COMPLETED)
                ended = [call for call in running if call.done.done() or not call.patience_s]
                running = [call for call in running if call not in ended]
                for call in ended:
                    call.end()
                    yield call
        finally:
            for call in running:
                call.end()

    def _take(self, call: AgentCall, samples: dict[Place, AgentSample]) -> dict[Place, str]:
        items: dict[Place, AgentItem] = {item.place: item for item in call.batch.iter_samples()}
        turns = by_item(call.turns)
        for place in turns.keys() - items.keys():
            logger.warning(
                "ignoring the agent's turns of prompt %d, sample %d: the batch of this agent call did not contain this sample",
                *place,
            )
        errors, claimed = {}, set[str | None]()
        for place, item in items.items():
            mine = turns.get(place, [])
            try:
                names = {turn.turn_id for turn in mine} - {None}
                if names & claimed:
                    raise ValueError(
                        "the agent returned a response with the same id for two samples; return each response only for its own "
                        "sample"
                    )
                claimed |= names
                if not mine:
                    errors[place] = call.error or "the agent returned no trajectory for this sample"
                    continue
                samples[place] = make_sample(item, mine, call.context, self._policy, self._tokenizer)
            except UsageError:
                raise
            except Exception as error:  # the turns that an agent returns may be invalid in any way
                errors[place] = f"{type(error).__name__}: {error}"
        return errors
