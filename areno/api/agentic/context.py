"""The ``ctx`` argument of an agent: the model's URL and API keys."""

import threading

from areno.api.agentic.data import METADATA, AgentItem, AgentTrajectory, AgentTrajectoryTurn
from areno.engine.rollout.counter_rng import derive_seed
from areno.rollouts.conversation.agent_server import AgentServer, AgentSession
from areno.rollouts.conversation.continuation import Turn


class AgentContext:
    """Context of one agent call: the URL, the API keys, and the responses recorded under these keys.

    Attributes:
        api_key: API key shared by all samples of the call. If a request with this key repeats the messages of a recorded
            conversation, the server assigns the request to that conversation.
        sampling_params: default sampling parameters of requests.
        max_running_prompts: maximum number of samples (not prompts) decoded concurrently; None uses the trainer's limit.
    """

    def __init__(self, server: AgentServer, seed: int) -> None:
        self.sampling_params, self.max_running_prompts = server.sampling, server.max_running_prompts
        self._server, self._seed = server, seed
        self._lock, self._closed = threading.Lock(), False
        self._shared = server.open(seed)
        self.api_key = self._shared.api_key
        self._own: dict[tuple[int, int], AgentSession] = {}

    @property
    def base_url(self) -> str:
        """URL of the endpoint, for the argument ``base_url`` of OpenAI clients."""
        return self.get_base_url()

    def get_base_url(self, item: AgentItem | None = None) -> str:
        """Return the URL of the OpenAI-compatible endpoint.

        If ``item`` is a task, the URL contains the API key of this task. If ``item`` is None, the URL contains no key. A URL
        with a key is for programs that cannot set an API key.
        """
        return self._shared.base_url if item is None else self._session_of(item).keyed_url

    def get_api_key(self, item: AgentItem) -> str:
        """Return the API key of one task. :meth:`trajectory` returns the responses to all requests with this key."""
        return self._session_of(item).api_key

    def trajectory(self, item: AgentItem) -> AgentTrajectory:
        """Return the completed responses of one task, in order. The API key or base URL of a request identifies its task.

        An agent normally returns the server's responses as turns. If the agent cannot access complete responses, for example
        because its client library streams them or returns only their text, the agent can return this trajectory instead.
        """
        return AgentTrajectory([_as_returned(item, turn) for turn in list(self._session_of(item).recorder.turns)])

    def turn(self, turn_id: str | None, item: AgentItem) -> Turn:
        """Return the recorded turn with the id ``turn_id``. The turn must belong to the task ``item``.

        Raises ValueError if the turn belongs to another task, or was not recorded during this agent call.
        """
        with self._lock:
            sessions = [(item.place, self._shared), *self._own.items()]
        for place, session in sessions:
            turn = session.recorder.find(turn_id)
            if turn is not None and place != item.place:
                raise ValueError(
                    f"the response was generated for prompt {place[0]}, sample {place[1]}, but was returned for prompt "
                    f"{item.place[0]}, sample {item.place[1]}; return each response only for its own sample"
                )
            if turn is not None:
                return turn
        raise ValueError(
            "the response was not recorded during this call of the agent; the agent must return the responses of the server "
            "at ctx.get_base_url() unchanged"
        )

    def close(self) -> None:
        """Reject further requests. Recorded turns remain available."""
        with self._lock:
            self._closed = True
            for session in (self._shared, *self._own.values()):
                self._server.end(session)

    def _session_of(self, item: AgentItem) -> AgentSession:
        with self._lock:
            if item.place not in self._own:
                self._own[item.place] = self._server.open(derive_seed(self._seed, *item.place))
                if self._closed:  # an abandoned agent is still running
                    self._server.end(self._own[item.place])
            return self._own[item.place]


def _as_returned(item: AgentItem, turn: Turn) -> AgentTrajectoryTurn:
    response = {
        "choices": [{"index": 0, "message": turn.answer, "finish_reason": turn.finish}],
        METADATA: {"turn": turn.id, "response_tokens": turn.tokens, "response_logprobs": turn.logprobs},
    }
    return AgentTrajectoryTurn(item=item, messages=list(turn.messages), response=response, tools=turn.tools)
