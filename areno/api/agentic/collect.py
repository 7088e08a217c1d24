"""Running an agent over a batch so that a bad sample costs itself only.

The agent is called once with the whole batch. Samples that it did not finish, because it raised, was late, returned
nothing for them or something that cannot be used, are run again one by one: each with keys, a thread and a deadline of
its own. What still fails after ``retries`` such attempts is dropped, with its error.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areno.api.agentic.calls import AgentCall, AgentFn
from areno.api.agentic.data import AgentBatch, AgentItem
from areno.api.agentic.samples import AgentSample, make_sample, turns_in
from areno.api.agentic.trajectory import AgentTrajectoryTurn
from areno.engine.rollout.counter_rng import derive_seed
from areno.errors import UsageError
from areno.rollouts.conversation.spans import LossMaskPolicy

if TYPE_CHECKING:  # it imports the packages of the server
    from areno.api.agentic.proxy import AgentProxy

logger = logging.getLogger(__name__)

MAX_CALLS = 32
"""Most samples that are run again at the same time."""

Place = tuple[int, int]
"""Prompt and sample index."""


def by_item(returned: Any) -> dict[Place, list[AgentTrajectoryTurn]]:
    """The turns that an agent returned, by the task that they belong to.

    Raises:
        AgentError: it returned something else.
    """
    found: dict[Place, list[AgentTrajectoryTurn]] = {}
    for turn in turns_in(returned):
        found.setdefault(place_of(turn.item), []).append(turn)
    return found


def place_of(item: AgentItem) -> Place:
    """Prompt and sample index of a task."""
    return item.prompt_index, item.sample_index


@dataclass(slots=True)
class Collected:
    """What a batch gave.

    Attributes:
        samples: those that came to their end, in the order of prompts and samples.
        errors: of those that did not, by prompt and sample index.
        rerun: how many were run again alone.
    """

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

    def collect(self, proxy: AgentProxy, batch: AgentBatch) -> Collected:
        """Run the agent over a batch.

        Args:
            proxy: of an open session.
            batch: the tasks.

        Raises:
            UsageError: the policy trains on context, and the tokenizer cannot tell its parts apart.
        """
        items = list(batch.iter_samples())
        found: dict[Place, AgentSample] = {}
        errors = self._attempt(proxy, [batch], found, 0)
        rerun = 0
        for attempt in range(1, self._retries + 1):
            again = [item for item in items if place_of(item) in errors]
            if not again:
                break
            rerun += len(again)
            self._say(again, errors, attempt)
            errors = self._attempt(proxy, [batch.only([item]) for item in again], found, attempt)
        return Collected([found[place] for place in sorted(found)], errors, rerun)

    def _attempt(
        self, proxy: AgentProxy, batches: Sequence[AgentBatch], found: dict[Place, AgentSample], attempt: int
    ) -> dict[Place, str]:
        """Run the batches, put what they give into ``found``, and return what went wrong."""
        errors: dict[Place, str] = {}
        for call in self._calls(proxy, batches, attempt):
            errors |= self._take(call, found)
        return errors

    def _calls(self, proxy: AgentProxy, batches: Iterable[AgentBatch], attempt: int) -> Iterator[AgentCall]:
        """Calls that have ended, in the order of their ends."""
        waiting = deque(batches)
        running: list[AgentCall] = []
        try:
            while waiting or running:
                while waiting and len(running) < MAX_CALLS:
                    running.append(self._begin(proxy, waiting.popleft(), attempt))
                wait([call.done for call in running], min(c.patience_s for c in running), FIRST_COMPLETED)
                ended = [call for call in running if call.done.done() or not call.patience_s]
                running = [call for call in running if call not in ended]
                for call in ended:
                    call.end()
                    yield call
        finally:
            for call in running:
                call.end()

    def _begin(self, proxy: AgentProxy, batch: AgentBatch, attempt: int) -> AgentCall:
        first = next(batch.iter_samples())
        place = place_of(first) if attempt else (0, 0)
        context = proxy.context(derive_seed(proxy.seed, attempt, *place))
        return AgentCall(self._function, context, batch, self._timeout_s)

    def _take(self, call: AgentCall, found: dict[Place, AgentSample]) -> dict[Place, str]:
        items = {place_of(item): item for item in call.batch.iter_samples()}
        turns = by_item(call.turns)
        for place in turns.keys() - items.keys():
            logger.warning("the agent returned turns of prompt %d, sample %d, which it was not given; left out", *place)
        if call.abandoned:
            logger.warning("an agent could not be ended: its thread is left behind (%s)", call.error)
        errors, claimed = {}, set[str]()
        for place, item in items.items():
            try:
                mine = self._unclaimed(turns.get(place, []), claimed)
                if not mine:
                    errors[place] = call.error or "the agent returned no trajectory for this sample"
                    continue
                found[place] = make_sample(item, mine, call.context, self._policy, self._tokenizer)
            except UsageError:
                raise
            except Exception as error:  # what an agent returns may be broken in any way
                errors[place] = f"{type(error).__name__}: {error}"
        return errors

    def _unclaimed(self, turns: list[AgentTrajectoryTurn], claimed: set[str]) -> list[AgentTrajectoryTurn]:
        """The turns of one sample, none of which may count for another one as well."""
        names = {turn.turn_id for turn in turns} - {None}
        if names & claimed:
            raise ValueError("the agent returned a response for two samples; each counts for one")
        claimed.update(str(name) for name in names)
        return turns

    def _say(self, items: Sequence[AgentItem], errors: dict[Place, str], attempt: int) -> None:
        first = place_of(items[0])
        logger.warning(
            "%d samples were not finished and are run again one by one (attempt %d of %d); "
            "the first is prompt %d, sample %d: %s",
            *(len(items), attempt, self._retries, *first, errors[first]),
        )
