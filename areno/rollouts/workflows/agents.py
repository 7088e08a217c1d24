"""Runs any agent as a workflow. An agent has a method ``async run(data, **extra)``, which uses an OpenAI or Anthropic client.

The client must use the address and the API key of areno's server. The server records the exact tokens of all turns. After
``run`` has returned, the turns become training rows.
"""

import asyncio
import inspect
import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from areno.config.experiment.generation_sections import AgentConfig
from areno.config.packages import require_packages
from areno.engine.rollout.counter_rng import derive_seed
from areno.errors import AgentError, UsageError
from areno.loss_fns.gae import discounted_returns
from areno.rollouts.conversation.agent_server import AgentServer, AgentSession
from areno.rollouts.conversation.continuation import Turn
from areno.rollouts.conversation.spans import LossMaskPolicy
from areno.rollouts.conversation.trajectory_rows import TrajectoryRow, build_rows
from areno.rollouts.engine_client import EPISODE, EngineClient, Episode, GenerationSettings, sampling_params
from areno.rollouts.workflows.base import EpisodeResult, Interaction, RolloutWorkflow
from areno.rollouts.workflows.pickling import name_of, pickled
from areno.rollouts.workflows.processes import AgentProcesses, returned_value

logger = logging.getLogger(__name__)

DEFAULTS = AgentConfig(tool_call_parser="auto", reasoning_parser="auto")
"""Default options of agents that run without an experiment configuration."""


class AgentWorkflow(RolloutWorkflow):
    """Runs an agent once per sample.

    The agent's method ``run`` returns the reward of the last answer as a number, or a dictionary from response ids to rewards.
    If the agent has sent rewards to ``/rl/set_reward``, ``run`` may return None. An episode without any reward fails.

    Args:
        agent: object with a method ``async run(data, **extra)``. ``extra`` contains ``base_url`` and ``api_key``, and in mode
            ``inline`` also ``http_client``. If ``run`` has no ``**extra``, it gets only the arguments that it declares.
        gconfig: default sampling settings of the agent's requests.
        options: agent options, such as the mode. In mode ``subproc``, the agent also gets the address and the key as
            environment variables (see :attr:`AgentSession.environment`).
        model_name: the model's name in requests.

    Raises:
        UsageError: the object is not an agent, an option is unsupported, or the server's packages are not installed.
    """

    def __init__(
        self, agent: Any, gconfig: GenerationSettings, options: AgentConfig = DEFAULTS, model_name: str = "default"
    ) -> None:
        if not is_agent(agent):
            raise UsageError(
                f"{name_of(agent)} is not an agent; define the method `async def run(self, data, **extra)`"
            )
        if options.mode not in ("inline", "subproc"):
            raise UsageError(f"agent.mode {options.mode!r} is not supported; use inline or subproc")
        if options.export_style not in ("individual", "concat"):
            raise UsageError(f"agent.export_style {options.export_style!r} is unknown; use individual or concat")
        if gconfig.min_new_tokens:
            raise UsageError(
                f"gconfig.min_new_tokens={gconfig.min_new_tokens} is not supported for agents; set it to 0"
            )
        require_packages("serve", "agents need")
        self.agent, self.gconfig = agent, gconfig
        self._options, self._model_name, self._timeout_s = options, model_name, options.session_timeout_seconds
        self._server: AgentServer | None = None
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._sent = pickled(agent, "agent") if options.mode == "subproc" else b""
        self._processes = AgentProcesses(options.subproc_max_workers) if options.mode == "subproc" else None

    async def arun_episode(self, engine: EngineClient, data: dict[str, Any]) -> EpisodeResult:
        """See :meth:`RolloutWorkflow.arun_episode`."""
        server = await self._served(engine)
        episode = EPISODE.get() or Episode(-1, next(self._numbers))
        session = server.open(derive_seed(server.seed, episode.task_id, episode.sample or 0))
        try:
            _set_rewards(session, await self._run(session, data))
            if self._options.set_reward_finish_timeout:
                await asyncio.sleep(self._options.set_reward_finish_timeout)
        finally:
            server.end(session)
        # Nothing can be trained on before the first answer with tokens.
        turns = list(itertools.dropwhile(lambda turn: not turn.tokens, session.recorder.turns))
        if not turns:
            raise AgentError(
                f"agent {name_of(self.agent)} ended without a model answer; let the agent's client use the arguments base_url "
                "and api_key of the method `run`"
            )
        if all(turn.reward is None for turn in turns):
            raise AgentError(
                f"agent {name_of(self.agent)} neither returned nor set a reward; the method `run` must return a number, "
                "or a dictionary from response ids to rewards"
            )
        return export_interactions(turns, self._options, engine.tokenizer)

    async def aclose(self) -> None:
        """Close the agents' processes and the server."""
        if self._processes is not None:
            self._processes.close()
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)

    async def _served(self, client: EngineClient) -> AgentServer:
        async with self._starting:
            if self._server is None:
                limits = (self._options.engine_max_tokens, self.gconfig.max_tokens, client.engine.context_length)
                limit = min(limit for limit in limits if limit)
                self._server = await asyncio.to_thread(
                    AgentServer,
                    client.engine,
                    sampling_params(self.gconfig, 0, limit),
                    limit,
                    seed=client.seed,
                    model_name=self._model_name,
                    tool_call_parser=self._options.tool_call_parser,
                    reasoning_parser=self._options.reasoning_parser,
                    request_timeout_s=self._timeout_s,
                )
                logger.info("the agent server listens at %s", self._server.url)
        return self._server

    async def _run(self, session: AgentSession, data: dict[str, Any]) -> float | dict[str, float] | None:
        extra = {"base_url": session.base_url, "api_key": session.api_key}
        if self._processes is not None:
            arguments = _accepted(self.agent.run, extra)
            return await self._processes.run(self._sent, data, arguments, session.environment, self._timeout_s)
        import httpx

        # A new client per run, because an agent may close it; no certificate checks, because the server is on this machine.
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline, httpx.AsyncClient(timeout=self._timeout_s, verify=False) as http_client:
                arguments = _accepted(self.agent.run, {**extra, "http_client": http_client})
                return returned_value(await self.agent.run(data, **arguments))
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise AgentError(
                f"agent {name_of(self.agent)} did not end within {self._timeout_s:g} s (agent.session_timeout_seconds)"
            ) from error


def is_agent(thing: Any) -> bool:
    """Whether an object has a coroutine function ``run``."""
    return inspect.iscoroutinefunction(getattr(thing, "run", None))


def _accepted(run: Any, extra: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(run).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return extra
    return {name: value for name, value in extra.items() if name in parameters}


def _set_rewards(session: AgentSession, returned: float | dict[str, float] | None) -> None:
    if isinstance(returned, dict):
        for name, reward in returned.items():
            try:
                session.recorder.set_reward(reward, name)
            except ValueError as error:
                raise AgentError(
                    f"the agent's method `run` returned a reward for an unknown response: {error}"
                ) from error
    elif returned is not None and any(turn.tokens for turn in session.recorder.turns):
        session.recorder.set_reward(returned)


def export_interactions(turns: Sequence[Turn], options: AgentConfig, tokenizer: Any) -> EpisodeResult:
    """Return a dictionary with the training rows of a session in chronological order. Its keys are unique names of the rows.

    The rows depend on the export style:

    - ``individual``: one row per answer, including the prompt.
    - ``concat``: one row per conversation, with all answers. If a conversation forks, each branch has a row, and the
      common prefix is trained on once.

    The reward of a row is the discounted return of the row's last answer. The return of an answer is its reward plus
    ``turn_discount`` times the return of the session's next answer. An answer without a reward has the reward 0. If the
    context had no room for an answer, the answer has no tokens and no row, but its reward counts in the returns of earlier
    answers.
    """
    answered = [turn for turn in turns if turn.tokens]
    counted = [turn for turn in turns if turn.tokens or turn.reward]
    discounted = discounted_returns([turn.reward or 0.0 for turn in counted], options.turn_discount)
    returns = dict(zip(counted, discounted, strict=True))
    if options.export_style == "individual":
        rows = [(turn, row) for turn in answered for row in _single_turn_rows(turn, tokenizer)]
    else:
        rows = [(answered[max(row.turns)], row) for row in build_rows(answered, LossMaskPolicy(), tokenizer)]
    return {
        f"{turn.response_id or turn.id}#{index}": Interaction(
            turn.response_id or turn.id, row, returns[turn], [*turn.messages, turn.answer], len(answered)
        )
        for index, (turn, row) in enumerate(rows)
    }


def _single_turn_rows(turn: Turn, tokenizer: Any) -> list[TrajectoryRow]:
    """Return a list with the row of one answer. The list is empty if a grammar forced all tokens of the answer."""
    return build_rows([replace(turn, parent=None, context_tokens=turn.prompt)], LossMaskPolicy(), tokenizer)
