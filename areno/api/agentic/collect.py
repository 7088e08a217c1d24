"""Running an agent over a batch so that a bad sample costs itself only.

The agent is called once with the whole batch. Samples that it did not finish, because it raised, was late, returned
nothing for them or something that cannot be used, are run again one by one: each with keys, a thread and a deadline of
its own. What still fails after ``retries`` such attempts is dropped, with its error.

What the agent does in its thread can stop neither the server nor the trainer. A coroutine that is late is cancelled, and
everything that it left running with it. A plain function cannot be: its thread is given up, and its keys with it.
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

GRACE_S = 5.0  # how long a cancelled agent may take to clean up
MAX_CALLS = 32  # most samples that are run again at the same time


class AgentCall:
    """One call of an agent, which begins at once; the keys of its context end with it.

    Attributes:
        turns: what it has returned so far; an agent that yields keeps what it yielded, whatever comes then.
        error: why it failed; empty where it did not.
        done: resolves when it has ended.
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
        """Seconds until nothing will be waited for any more."""
        return max(0.0, self._deadline + GRACE_S - time.monotonic())

    def end(self) -> None:
        """Take what there is; an agent that still runs is cancelled, or given up."""
        self.context.close()
        if not self.done.done():
            self.error = self.error or self._late()
            if self._loop is not None and self._task is not None:
                with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                    self._loop.call_soon_threadsafe(self._task.cancel)
        # A plain function that is late has been waited for already, and nothing can end it.
        self._thread.join(GRACE_S if self.done.done() or self._task is not None else 0.0)
        if self._thread.is_alive():
            logger.warning("an agent could not be ended: its thread is left behind (%s)", self.error)

    def _late(self) -> str:
        return f"no end within {self._timeout_s:g} s (--agent-timeout-s)"

    def _run(self) -> None:
        try:
            returned = None if self._is_async else self._function(self.context, self.batch)
            asyncio.run(self._main(returned))
        except BaseException as error:  # whatever an agent raises, SystemExit included, is its own
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
    """The error with the innermost line of the user's file; areno's own say enough by themselves."""
    if isinstance(error, ArenoError):
        return str(error)
    if isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return describe_error(error, source_file(function))


def by_item(returned: Any) -> dict[Place, list[AgentTrajectoryTurn]]:
    """The turns that an agent returned, by the place of their task; AgentError where it returned something else."""
    turns: dict[Place, list[AgentTrajectoryTurn]] = {}
    for turn in turns_in(returned):
        turns.setdefault(turn.item.place, []).append(turn)
    return turns


@dataclass(slots=True)
class Collected:
    """Samples in the order of prompts and samples, errors of those that failed, and how many were run again alone."""

    samples: list[AgentSample] = field(default_factory=list)
    errors: dict[Place, str] = field(default_factory=dict)
    rerun: int = 0


class AgentRunner:
    """Runs one agent over batches.

    Args:
        function: ``run_agent(ctx, batch)``, async or not; may also yield what it returns.
        policy: which tokens are trained on.
        tokenizer: the model's.
        timeout_s: deadline of each call.
        retries: how often a sample that was not finished is run again, alone.
    """

    def __init__(
        self, function: AgentFn, policy: LossMaskPolicy, tokenizer: Any, *, timeout_s: float, retries: int = 1
    ) -> None:
        self._function, self._policy, self._tokenizer = function, policy, tokenizer
        self._timeout_s, self._retries = timeout_s, retries

    def collect(self, server: AgentServer, batch: AgentBatch) -> Collected:
        """Run the agent over a batch, with the server of an open session (``session.proxy``).

        Raises UsageError: the policy trains on context, and the tokenizer cannot tell its parts apart.
        """
        samples: dict[Place, AgentSample] = {}
        batches, rerun, attempt = [batch], 0, 0
        while True:
            errors: dict[Place, str] = {}
            for call in self._calls(server, batches, attempt):
                errors |= self._take(call, samples)
            again = [item for item in batch.iter_samples() if item.place in errors]
            if not again or attempt == self._retries:
                return Collected([samples[place] for place in sorted(samples)], errors, rerun)
            batches, rerun, attempt = [batch.only([item]) for item in again], rerun + len(again), attempt + 1
            logger.warning(
                "%d samples were not finished and are run again one by one (attempt %d of %d); "
                "the first is prompt %d, sample %d: %s",
                *(len(again), attempt, self._retries, *again[0].place, errors[again[0].place]),
            )

    def _calls(self, server: AgentServer, batches: Iterable[AgentBatch], attempt: int) -> Iterator[AgentCall]:
        """Calls that have ended, in the order of their ends."""
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
            logger.warning("the agent returned turns of prompt %d, sample %d, which it was not given; left out", *place)
        errors, claimed = {}, set[str | None]()
        for place, item in items.items():
            mine = turns.get(place, [])
            try:
                names = {turn.turn_id for turn in mine} - {None}
                if names & claimed:
                    raise ValueError("the agent returned a response for two samples; each counts for one")
                claimed |= names
                if not mine:
                    errors[place] = call.error or "the agent returned no trajectory for this sample"
                    continue
                samples[place] = make_sample(item, mine, call.context, self._policy, self._tokenizer)
            except UsageError:
                raise
            except Exception as error:  # what an agent returns may be broken in any way
                errors[place] = f"{type(error).__name__}: {error}"
        return errors
