"""``ctx``: what an agent is given besides its tasks, namely where the model is and how to tell samples apart."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from areno.api.agentic.data import AgentItem
from areno.api.agentic.trajectory import METADATA, AgentTrajectory, AgentTrajectoryTurn
from areno.engine.rollout.counter_rng import derive_seed
from areno.rollouts.conversation.tape import AgentTape, TapeDeck, Turn
from areno.serving.recording import KEY_PREFIX
from areno.types import SamplingParams

_Place = tuple[int, int]


class AgentContext:
    """One call of an agent: its address, its keys, and what was recorded under them.

    Args:
        deck: issues keys.
        url: of the server, without ``/v1``.
        seed: what the draws of the call derive from.
        sampling: what requests that do not say otherwise are sampled with.
        max_running_prompts: most samples that are decoded at once; None is the trainer's number.

    Attributes:
        api_key: for all samples of the call; requests of different samples are told apart by what they say.
    """

    def __init__(
        self, deck: TapeDeck, url: str, seed: int, sampling: SamplingParams, max_running_prompts: int | None
    ) -> None:
        self.sampling_params, self.max_running_prompts = sampling, max_running_prompts
        self._deck, self._url, self._seed = deck, url, seed
        self._lock = threading.Lock()
        self.api_key, self._shared = deck.issue(seed)
        self._own: dict[_Place, tuple[str, AgentTape]] = {}

    @property
    def base_url(self) -> str:
        """What OpenAI clients take as ``base_url``."""
        return self.get_base_url()

    def get_base_url(self, item: AgentItem | None = None) -> str:
        """The endpoint; with a task one of its own, for programs that can be given a URL but no key."""
        return f"{self._url}/v1" if item is None else f"{self._url}{KEY_PREFIX}{self.get_api_key(item)}/v1"

    def get_api_key(self, item: AgentItem) -> str:
        """A key of a task's own: what is said under it is recorded apart, see :meth:`trajectory`."""
        return self._tape_of(item)[0]

    def trajectory(self, item: AgentItem) -> AgentTrajectory:
        """All answers that came to their end under a task's own key or base URL, in order.

        An agent that knows nothing of areno, or that streams, is trained by returning this.
        """
        turns = list(self._tape_of(item)[1].turns)
        return AgentTrajectory([_as_returned(item, turn) for turn in turns])

    def turn(self, turn_id: str | None, item: AgentItem) -> Turn:
        """The recorded answer that a task's response names.

        Raises:
            ValueError: there is none, or it belongs to another task.
        """
        for place, tape in self._tapes():
            found = tape.find(turn_id)
            if found is not None and place in (None, (item.prompt_index, item.sample_index)):
                return found
            if found is not None:
                raise ValueError(f"the response belongs to prompt {place[0]}, sample {place[1]}")  # type: ignore[index]
        raise ValueError(
            "the response is not from this call's session; return the responses of ctx.get_base_url() as they came"
        )

    def close(self) -> None:
        """Let no request in any more; what is recorded stays."""
        with self._lock:
            for key in (self.api_key, *(key for key, _ in self._own.values())):
                self._deck.revoke(key)

    def _tape_of(self, item: AgentItem) -> tuple[str, AgentTape]:
        place = (item.prompt_index, item.sample_index)
        with self._lock:
            if place not in self._own:
                self._own[place] = self._deck.issue(derive_seed(self._seed, *place))
            return self._own[place]

    def _tapes(self) -> Iterator[tuple[_Place | None, AgentTape]]:
        yield None, self._shared
        with self._lock:
            own = list(self._own.items())
        yield from ((place, tape) for place, (_, tape) in own)


def _as_returned(item: AgentItem, turn: Turn) -> AgentTrajectoryTurn:
    response: dict[str, Any] = {
        "choices": [{"index": 0, "message": turn.answer, "finish_reason": turn.finish}],
        METADATA: {"turn": turn.id, "response_tokens": turn.tokens, "response_logprobs": turn.logprobs},
    }
    return AgentTrajectoryTurn(item=item, messages=list(turn.messages), response=response, tools=turn.tools)
