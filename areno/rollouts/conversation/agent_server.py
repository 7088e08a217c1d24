"""The HTTP server for agents. It is the same server as in ``areno serve``, but runs in a thread and uses the rollout engine."""

import secrets
from dataclasses import dataclass
from typing import Any

from areno.rollouts.conversation.recorder import ConversationRecorder
from areno.serving.recording import KEY_PREFIX
from areno.types import SamplingParams

# Agents' requests that exceed the engine's capacity wait instead of being rejected.
_MAX_QUEUE = 1 << 20


@dataclass(frozen=True, slots=True)
class AgentSession:
    """The API key and the server address of one agent. ``url`` does not include ``/v1``."""

    api_key: str
    recorder: ConversationRecorder
    url: str

    @property
    def base_url(self) -> str:
        """The ``base_url`` for OpenAI clients."""
        return f"{self.url}/v1"

    @property
    def keyed_url(self) -> str:
        """A base URL that includes the API key, for programs that cannot send the key in a header."""
        return f"{self.url}{KEY_PREFIX}{self.api_key}/v1"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables from which clients read the server's address and the API key."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_AUTH_TOKEN": self.api_key,
            "ARENO_SESSION_URL": self.keyed_url,
        }


class AgentServer:
    """A running server on a free loopback port. Implements :class:`areno.serving.recording.Recorder`.

    Args:
        engine: generates the answers.
        sampling: default sampling parameters of requests.
        context_limit: maximum number of tokens in a conversation.
        seed: base seed. The seeds of requests are derived from this seed.
        max_running_prompts: maximum number of samples that are decoded at once. Agents can query this number.
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
        from areno.serving.server import ServerThread  # needs areno[serve], which only rollouts with agents require
        from areno.serving.service import Service, ServingConfig

        self.sampling, self.context_limit = sampling, context_limit
        self.seed, self.max_running_prompts = seed, max_running_prompts
        self._engine, self._tapes = engine, dict[str, ConversationRecorder]()
        config = ServingConfig(default_max_tokens=sampling.max_new_tokens, max_queue=_MAX_QUEUE, **serving)
        self._keep_contexts(True)  # a turn reuses the KV cache of the previous turn
        self._server = ServerThread(Service(config, engine, self))
        self.url = self._server.url

    def of_key(self, key: str) -> ConversationRecorder | None:
        """Return the recorder for requests with this API key. None if the key is unknown or revoked."""
        return self._tapes.get(key)

    def open(self, seed: int) -> AgentSession:
        """Create an API key, and a recorder for the requests that use this key.

        If such a request sets no seed, its seed is derived from ``seed``.
        """
        key = f"areno-agentic-{secrets.token_hex(12)}"
        self._tapes[key] = ConversationRecorder(self._engine.tokenizer, seed)
        return AgentSession(key, self._tapes[key], self.url)

    def end(self, session: AgentSession) -> None:
        """Revoke the session's API key. The session keeps its recorded turns."""
        self._tapes.pop(session.api_key, None)

    def stop(self) -> None:
        """Cancel running requests, and stop the server's thread."""
        self._server.stop()
        self._keep_contexts(False)

    def _keep_contexts(self, keep: bool) -> None:
        if hasattr(self._engine, "enable_prefix_cache"):
            self._engine.enable_prefix_cache(keep)
