"""``ctx``: what an agent is given besides its tasks, namely where the model is and how to tell samples apart."""

import threading

from areno.api.agentic.data import METADATA, AgentItem, AgentTrajectory, AgentTrajectoryTurn
from areno.engine.rollout.counter_rng import derive_seed
from areno.rollouts.conversation.agent_server import AgentServer, AgentSession
from areno.rollouts.conversation.continuation import Turn


class AgentContext:
    """One call of an agent: its address, its keys, and what was recorded under them.

    Attributes:
        api_key: for all samples of the call; requests of different samples are told apart by what they say.
        sampling_params: what requests that do not say otherwise are sampled with.
        max_running_prompts: most samples that are decoded at once; None is the trainer's number.
    """

    def __init__(self, server: AgentServer, seed: int) -> None:
        self.sampling_params, self.max_running_prompts = server.sampling, server.max_running_prompts
        self._server, self._seed = server, seed
        self._lock = threading.Lock()
        self._shared = server.open(seed)
        self.api_key = self._shared.api_key
        self._own: dict[tuple[int, int], AgentSession] = {}

    @property
    def base_url(self) -> str:
        """What OpenAI clients take as ``base_url``."""
        return self.get_base_url()

    def get_base_url(self, item: AgentItem | None = None) -> str:
        """The endpoint; with a task one of its own, for programs that can be given a URL but no key."""
        return self._shared.base_url if item is None else self._session_of(item).keyed_url

    def get_api_key(self, item: AgentItem) -> str:
        """A key of a task's own: what is said under it is recorded apart, see :meth:`trajectory`."""
        return self._session_of(item).api_key

    def trajectory(self, item: AgentItem) -> AgentTrajectory:
        """All answers that came to their end under a task's own key or base URL, in order.

        An agent that knows nothing of areno, or that streams, is trained by returning this.
        """
        return AgentTrajectory([_as_returned(item, turn) for turn in list(self._session_of(item).tape.turns)])

    def turn(self, turn_id: str | None, item: AgentItem) -> Turn:
        """The recorded answer that a task's response names; ValueError for another task's, or none of this call."""
        with self._lock:
            sessions = [(item.place, self._shared), *self._own.items()]
        for place, session in sessions:
            turn = session.tape.find(turn_id)
            if turn is not None and place != item.place:
                raise ValueError(f"the response belongs to prompt {place[0]}, sample {place[1]}")
            if turn is not None:
                return turn
        raise ValueError(
            "the response is not from this call's session; return the responses of ctx.get_base_url() as they came"
        )

    def close(self) -> None:
        """Let no request in any more; what is recorded stays."""
        with self._lock:
            for session in (self._shared, *self._own.values()):
                self._server.end(session)

    def _session_of(self, item: AgentItem) -> AgentSession:
        with self._lock:
            if item.place not in self._own:
                self._own[item.place] = self._server.open(derive_seed(self._seed, *item.place))
            return self._own[item.place]


def _as_returned(item: AgentItem, turn: Turn) -> AgentTrajectoryTurn:
    response = {
        "choices": [{"index": 0, "message": turn.answer, "finish_reason": turn.finish}],
        METADATA: {"turn": turn.id, "response_tokens": turn.tokens, "response_logprobs": turn.logprobs},
    }
    return AgentTrajectoryTurn(item=item, messages=list(turn.messages), response=response, tools=turn.tools)
