"""The server that a rollout session has for its agents: ``areno serve`` in a thread, over the engine that trains."""

from __future__ import annotations

from areno.api.agentic.context import AgentContext
from areno.engine.backend import Backend
from areno.rollouts.conversation.tape import TapeDeck
from areno.serving.server import ServerThread
from areno.serving.service import Service, ServingConfig
from areno.types import SamplingParams, tightest

MODEL_NAME = "policy"
"""The model's name in agents' requests."""

# An agent that asks for more at once than the engine decodes shall wait, and not be refused.
_MAX_QUEUE = 1 << 20


class AgentProxy:
    """A running server; :meth:`stop` ends it.

    Args:
        engine: generates.
        sampling: default generation controls.
        max_running_prompts: most sequences decoded at once.
        seed: what the draws of agents derive from.
        timeout_s: deadline of each request.
        disable_thinking: pass ``enable_thinking=False`` to the chat template.
    """

    def __init__(
        self,
        engine: Backend,
        sampling: SamplingParams,
        *,
        max_running_prompts: int | None,
        seed: int,
        timeout_s: float,
        disable_thinking: bool,
    ) -> None:
        self.seed = seed
        self.context_limit = tightest(sampling.max_context_len, engine.context_length)
        self._sampling, self._running = sampling, max_running_prompts
        self._deck = TapeDeck(engine.tokenizer, sampling, self.context_limit)
        config = ServingConfig(
            model_name=MODEL_NAME,
            default_max_tokens=sampling.max_new_tokens,
            max_queue=_MAX_QUEUE,
            disable_thinking=disable_thinking,
            request_timeout_s=timeout_s,
        )
        self._engine = engine
        engine.keep_contexts(True)  # turns begin with what the turn before has computed already
        self._server = ServerThread(Service(config, engine, self._deck))

    def context(self, seed: int) -> AgentContext:
        """Address and keys for one call of an agent."""
        return AgentContext(self._deck, self._server.url, seed, self._sampling, self._running)

    def stop(self) -> None:
        """Cancel what runs, and end the server's thread."""
        self._server.stop()
        self._engine.keep_contexts(False)
