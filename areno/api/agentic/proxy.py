"""The server that a rollout session has for its agents: ``areno serve`` in a thread, over the engine that trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areno.api.agentic.context import AgentContext
from areno.rollouts.conversation.tape import TapeDeck
from areno.serving.server import ServerThread
from areno.serving.service import Service, ServingConfig
from areno.types import tightest

if TYPE_CHECKING:
    from areno.api.session import RolloutSession
    from areno.engine.parallel.group import AnyEngine

MODEL_NAME = "policy"
"""The model's name in agents' requests."""

# An agent that asks for more at once than the engine decodes shall wait, and not be refused.
_MAX_QUEUE = 1 << 20


class AgentProxy:
    """A running server; :meth:`stop` ends it.

    Args:
        session: says how to sample.
        engine: generates.
    """

    def __init__(self, session: RolloutSession, engine: AnyEngine) -> None:
        sampling = session.sampling_params
        self.context_limit = tightest(sampling.max_context_len, engine.context_length)
        self._session = session
        self._deck = TapeDeck(engine.tokenizer, sampling, self.context_limit)
        config = ServingConfig(
            model_name=MODEL_NAME,
            default_max_tokens=sampling.max_new_tokens,
            max_queue=_MAX_QUEUE,
            disable_thinking=session.disable_thinking,
            request_timeout_s=session.timeout_s,
        )
        self._engine = engine
        engine.keep_contexts(True)  # turns begin with what the turn before has computed already
        self._server = ServerThread(Service(config, engine, self._deck))

    def context(self, seed: int) -> AgentContext:
        """Address and keys for one call of an agent."""
        session = self._session
        return AgentContext(self._deck, self._server.url, seed, session.sampling_params, session.max_running_prompts)

    def stop(self) -> None:
        """Cancel what runs, and end the server's thread."""
        self._server.stop()
        self._engine.keep_contexts(False)
