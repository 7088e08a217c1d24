"""The server that agents talk to: one for all episodes, a session with a key of its own for each of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from areno.engine.rollout.counter_rng import derive_seed
from areno.rollouts.conversation.tape import AgentTape, TapeDeck
from areno.rollouts.engine_client import EPISODE, EngineClient, Episode, GenerationSettings, sampling_params
from areno.serving.recording import KEY_PREFIX

# An agent that asks for more at once than the engine decodes shall wait, and not be refused.
_MAX_QUEUE = 1 << 20


@dataclass(slots=True)
class AgentSession:
    """One episode of an agent.

    Attributes:
        api_key: lets it in, and says which episode a request belongs to.
        tape: what it says.
        url: of the server, without ``/v1``.
    """

    api_key: str
    tape: AgentTape
    url: str

    @property
    def base_url(self) -> str:
        """What OpenAI clients take as ``base_url``."""
        return f"{self.url}/v1"

    @property
    def environment(self) -> dict[str, str]:
        """Variables from which clients take address and key by themselves."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_AUTH_TOKEN": self.api_key,
            "ARENO_SESSION_URL": f"{self.url}{KEY_PREFIX}{self.api_key}/v1",
        }


class SessionServer:
    """A running server on a free loopback port; close it.

    Args:
        client: has the engine.
        gconfig: what requests that do not say otherwise are sampled with.
        model_name: the model's name in requests.
        engine_max_tokens: most tokens of a conversation; None is what ``gconfig.max_tokens`` and the model allow.
        tool_call_parser: how the model writes tool calls.
        reasoning_parser: how the model writes reasoning.
        timeout_s: longest that a request may take.

    Raises:
        UsageError: a parser is unknown, or a setting cannot work.
    """

    def __init__(
        self,
        client: EngineClient,
        gconfig: GenerationSettings,
        *,
        model_name: str = "default",
        engine_max_tokens: int | None = None,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        timeout_s: float = 3600.0,
    ) -> None:
        engine: Any = client.engine
        limits = [limit for limit in (engine_max_tokens, gconfig.max_tokens, engine.context_length) if limit]
        sampling = sampling_params(gconfig, 0, min(limits))
        self._deck = TapeDeck(engine.tokenizer, sampling, min(limits))
        from areno.serving.server import ServerThread  # needs areno[serve], which workflows without agents do not
        from areno.serving.service import Service, ServingConfig

        config = ServingConfig(
            model_name=model_name,
            default_max_tokens=sampling.max_new_tokens,
            max_queue=_MAX_QUEUE,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            request_timeout_s=timeout_s,
        )
        self._client, self._numbers = client, itertools.count()
        if hasattr(engine, "keep_contexts"):
            engine.keep_contexts(True)  # turns begin with what the turn before has computed already
        self._server = ServerThread(Service(config, engine, self._deck))
        self.url = self._server.url

    def open(self) -> AgentSession:
        """A new session; its draws derive from the episode that the caller belongs to."""
        episode = EPISODE.get() or Episode(-1, next(self._numbers))
        key, tape = self._deck.issue(derive_seed(self._client.seed, episode.task_id, episode.sample))
        return AgentSession(key, tape, self._server.url)

    def end(self, session: AgentSession) -> None:
        """Let nobody come in with the session's key any more."""
        self._deck.revoke(session.api_key)

    def close(self) -> None:
        """Cancel what runs, and end the server's thread."""
        self._server.stop()
        if hasattr(self._client.engine, "keep_contexts"):
            self._client.engine.keep_contexts(False)
