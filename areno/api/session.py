"""The rollout session of the SDK. Generation is allowed only while a session is open.

If ``proxy`` is true, the session runs the server of ``areno serve`` on a free loopback port, so that agents can use the
model. Pass the session to an agent as its ``ctx``. See :mod:`areno.api.agentic`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areno.types import SamplingParams, tightest

if TYPE_CHECKING:
    from areno.api.agentic.context import AgentContext
    from areno.api.agentic.data import AgentItem, AgentTrajectory
    from areno.api.agentic.samples import AgentSample
    from areno.api.sampler import Sampler
    from areno.rollouts.conversation.agent_server import AgentServer
    from areno.rollouts.conversation.spans import LossMaskPolicy


@dataclass(eq=False)
class RolloutSession:
    """Context manager, sync or async, in which generation is allowed.

    See :meth:`areno.Trainer.rollout_session` for the arguments. Sessions can be nested. Only the outermost session
    prepares the backend and ends the rollout.
    """

    trainer: Sampler
    sampling_params: SamplingParams
    max_running_prompts: int | None
    wants_proxy: bool = False
    loss_mask_policy: LossMaskPolicy | None = None
    timeout_s: float = 300.0
    seed: int = 0
    disable_thinking: bool = False

    def __post_init__(self) -> None:
        self._proxy: AgentServer | None = None
        self._context: AgentContext | None = None

    @property
    def proxy(self) -> AgentServer:
        """The running server. Raises RuntimeError if the session has no server, or has not been entered."""
        if self._proxy is None:
            raise RuntimeError(
                "this rollout session has no server; open the session with proxy=True"
                if not self.wants_proxy
                else "the rollout session has not been entered; write `async with trainer.rollout_session(...) as ctx:`"
            )
        return self._proxy

    @property
    def agent_context(self) -> AgentContext:
        """URL and API keys for agents. In ``areno train``, the argument ``ctx`` of an agent has the same type."""
        if self._context is None:
            from areno.api.agentic.context import AgentContext

            self._context = AgentContext(self.proxy, self.seed)
        return self._context

    @property
    def api_key(self) -> str:
        """API key shared by all samples.

        The key does not identify a sample, so the server finds the conversation of a request by the content of the request.
        """
        return self.agent_context.api_key

    @property
    def base_url(self) -> str:
        """URL of the endpoint, for the argument ``base_url`` of OpenAI clients."""
        return self.agent_context.base_url

    def get_base_url(self, item: AgentItem | None = None) -> str:
        """Return the URL of the session's OpenAI-compatible endpoint.

        If ``item`` is a task, the URL contains the API key of this task. If ``item`` is None, the URL contains no key.
        See :meth:`areno.api.agentic.AgentContext.get_base_url`.
        """
        return self.agent_context.get_base_url(item)

    def get_api_key(self, item: AgentItem) -> str:
        """Return the API key of one task. :meth:`trajectory` returns the responses to all requests with this key."""
        return self.agent_context.get_api_key(item)

    def trajectory(self, item: AgentItem) -> AgentTrajectory:
        """Return the completed responses of one task. The API key or base URL of a request identifies its task."""
        return self.agent_context.trajectory(item)

    def samples(self, trajectories: Any) -> list[AgentSample]:
        """Convert an agent's turns to training rows and reward records, during the session or after its end.

        If ``loss_mask_policy`` selects tokens that were not sampled, such as tool results, the method waits until all
        running generation has finished, and then computes the log-probs of these tokens.

        Args:
            trajectories: turns, trajectories, or nested lists of turns and trajectories.

        Returns:
            One sample for each task (:class:`areno.api.agentic.AgentItem`) that has turns, ordered by ``prompt_index`` and
            ``sample_index``.

        Raises:
            ValueError: a response is from another session.
        """
        from areno.api.agentic.collect import by_item
        from areno.api.agentic.samples import fill_context_logprobs, make_sample
        from areno.rollouts.conversation.spans import LossMaskPolicy

        policy, tokenizer = self.loss_mask_policy or LossMaskPolicy(), self.trainer.get_tokenizer()
        samples = [
            make_sample(turns[0].item, turns, self.agent_context, policy, tokenizer)
            for _, turns in sorted(by_item(trajectories).items())
        ]
        fill_context_logprobs(self.trainer, samples)
        return samples

    def __enter__(self) -> RolloutSession:
        self.trainer.begin_rollout_session(self.max_running_prompts)
        try:
            if self.wants_proxy:
                self._proxy = self._start_proxy()
        except BaseException:
            self.trainer.end_rollout_session()
            raise
        return self

    def _start_proxy(self) -> AgentServer:
        from areno.config.packages import require_packages

        require_packages("serve", "agents need")
        from areno.rollouts.conversation.agent_server import AgentServer

        backend = self.trainer.backend
        return AgentServer(
            backend,
            self.sampling_params,
            tightest(self.sampling_params.max_context_len, backend.context_length),
            seed=self.seed,
            max_running_prompts=self.max_running_prompts,
            model_name="policy",
            disable_thinking=self.disable_thinking,
            request_timeout_s=self.timeout_s,
        )

    def __exit__(self, *_: object) -> None:
        try:
            if self._proxy is not None:
                self._proxy.stop()
        finally:
            self.trainer.end_rollout_session()

    async def __aenter__(self) -> RolloutSession:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()
