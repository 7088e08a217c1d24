"""The server that agents talk to: ``areno serve`` in a thread, over the engine that trains."""

import secrets
from dataclasses import dataclass
from typing import Any

from areno.rollouts.conversation.tape import AgentTape
from areno.serving.recording import KEY_PREFIX
from areno.types import SamplingParams

# An agent that asks for more at once than the engine decodes shall wait, and not be refused.
_MAX_QUEUE = 1 << 20


@dataclass(frozen=True, slots=True)
class AgentSession:
    """Access to the server under a key of its own; ``url`` is the server's, without ``/v1``."""

    api_key: str
    tape: AgentTape
    url: str

    @property
    def base_url(self) -> str:
        """What OpenAI clients take as ``base_url``."""
        return f"{self.url}/v1"

    @property
    def keyed_url(self) -> str:
        """A base URL that carries the key, for programs that can be given no key."""
        return f"{self.url}{KEY_PREFIX}{self.api_key}/v1"

    @property
    def environment(self) -> dict[str, str]:
        """Variables from which clients take address and key by themselves."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_AUTH_TOKEN": self.api_key,
            "ARENO_SESSION_URL": self.keyed_url,
        }


class AgentServer:
    """A running server on a free loopback port, and the tapes of its keys (:class:`areno.serving.recording.Recorder`).

    Args:
        engine: generates.
        sampling: what requests that do not say otherwise are sampled with.
        context_limit: most tokens of a conversation.
        seed: what the draws of agents derive from.
        max_running_prompts: most samples decoded at once, as agents are told.
        serving: further fields of :class:`areno.serving.service.ServingConfig`.
    """

    def __init__(
        self,
        engine: Any,
        sampling: SamplingParams,
        context_limit: int | None,
        *,
        seed: int = 0,
        max_running_prompts: int | None = None,
        **serving: Any,
    ) -> None:
        from areno.serving.server import ServerThread  # needs areno[serve], which workflows without agents do not
        from areno.serving.service import Service, ServingConfig

        self.sampling, self.context_limit = sampling, context_limit
        self.seed, self.max_running_prompts = seed, max_running_prompts
        self._engine, self._tapes = engine, dict[str, AgentTape]()
        config = ServingConfig(default_max_tokens=sampling.max_new_tokens, max_queue=_MAX_QUEUE, **serving)
        self._keep_contexts(True)  # turns begin with what the turn before has computed already
        self._server = ServerThread(Service(config, engine, self))
        self.url = self._server.url

    def tape(self, key: str) -> AgentTape | None:
        """The tape of an API key; None where it is unknown or was revoked."""
        return self._tapes.get(key)

    def open(self, seed: int) -> AgentSession:
        """A new API key with an empty tape; ``seed`` is what the seeds of its requests derive from."""
        key = f"areno-agentic-{secrets.token_hex(12)}"
        self._tapes[key] = AgentTape(self._engine.tokenizer, seed)
        return AgentSession(key, self._tapes[key], self.url)

    def end(self, session: AgentSession) -> None:
        """Revoke the session's key; what is recorded stays with its tape."""
        self._tapes.pop(session.api_key, None)

    def stop(self) -> None:
        """Cancel what runs, and end the server's thread."""
        self._server.stop()
        self._keep_contexts(False)

    def _keep_contexts(self, keep: bool) -> None:
        if hasattr(self._engine, "keep_contexts"):
            self._engine.keep_contexts(keep)
