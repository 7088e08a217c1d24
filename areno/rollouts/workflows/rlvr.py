"""A workflow with one prompt, one answer and one verifiable reward."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from areno.errors import DataError
from areno.rollouts.conversation.trajectory_rows import completion_row
from areno.rollouts.engine_client import EngineClient, GenerationSettings, ModelRequest, ModelResponse
from areno.rollouts.trajectory import Trajectory, make_trajectory
from areno.rollouts.workflows.base import EpisodeResult, RolloutWorkflow
from areno.rollouts.workflows.rewards import AsyncReward, RewardFn, as_reward_call
from areno.text.chat import Prompt, encode_generation_prompt
from areno.text.data_rows import PROMPT_FIELDS
from areno.text.markers import warn_about_markers

GetInputIds = Callable[[Any, Any, bool], list[int]]
ExtractPrompt = Callable[[dict[str, Any]], Any]


def extract_prompt(data: dict[str, Any]) -> Prompt:
    """Return the first non-empty field of ``messages``, ``prompt`` and ``question``. Raises DataError if all are missing or
    empty."""
    for name in PROMPT_FIELDS:
        if data.get(name):
            return data[name]
    raise DataError(
        f"a row has no messages, prompt or question, but only {', '.join(data)}; set data_extract_prompt_fn, or convert "
        "rows with a loader (train_dataset.dataset_kwargs.loader)"
    )


def input_ids_of(prompt: Any, tokenizer: Any, enable_thinking: bool) -> list[int]:
    """Encode a prompt with the chat template. Warns if the prompt already contains template markers."""
    warn_about_markers(tokenizer, prompt, f"the row {str(prompt)[:80]!r}")
    return encode_generation_prompt(tokenizer, prompt, disable_thinking=not enable_thinking)


class RLVRWorkflow(RolloutWorkflow):
    """Generates one answer per episode.

    Args:
        reward_fn: a reward function, its name, or an :class:`AsyncReward`. With None, all rewards are 0 until a reward model
            sets them.
        gconfig: sampling settings.
        tokenizer: tokenizer of the model.
        enable_thinking: whether the chat template enables reasoning.
        get_input_ids_fn: function ``(prompt, tokenizer, enable_thinking)`` that returns prompt tokens.
        data_extract_prompt_fn: function that returns the prompt of a data row.
    """

    def __init__(
        self,
        reward_fn: RewardFn | AsyncReward | None,
        gconfig: GenerationSettings,
        tokenizer: Any,
        enable_thinking: bool = False,
        get_input_ids_fn: GetInputIds = input_ids_of,
        data_extract_prompt_fn: ExtractPrompt = extract_prompt,
    ) -> None:
        self.reward = None if reward_fn is None else as_reward_call(reward_fn)
        self.gconfig, self.tokenizer = gconfig, tokenizer
        self.enable_thinking = enable_thinking
        self._input_ids, self._prompt_of = get_input_ids_fn, data_extract_prompt_fn

    async def arun_episode(self, engine: EngineClient, data: dict[str, Any]) -> EpisodeResult:
        """See :meth:`RolloutWorkflow.arun_episode`."""
        return (await self.arun_group(engine, data, 1))[0]

    async def arun_group(self, engine: EngineClient, data: dict[str, Any], samples: int) -> Sequence[EpisodeResult]:
        """Generate several answers with one request to the engine."""
        prompt_ids = list(self._input_ids(self._prompt_of(data), self.tokenizer, self.enable_thinking))
        answers = await engine.agenerate_group(ModelRequest(prompt_ids, self.gconfig), samples)
        prompt = self.tokenizer.decode(prompt_ids)
        return await asyncio.gather(*(self._rewarded(prompt, answer, data) for answer in answers))

    async def _rewarded(self, prompt: str, answer: ModelResponse, data: dict[str, Any]) -> Trajectory:
        reward = 0.0
        if self.reward is not None:
            text = answer_text(answer, self.tokenizer, self.gconfig)
            reward = await self.reward(prompt, text, answer.input_tokens, answer.output_tokens, **data)
        row = completion_row(answer.input_tokens, answer.sequence)
        return make_trajectory([(row, reward)])

    async def aclose(self) -> None:
        """Close the reward workers."""
        if self.reward is not None:
            self.reward.close()


def answer_text(answer: ModelResponse, tokenizer: Any, gconfig: GenerationSettings) -> str:
    """Decode an answer without its stop token."""
    tokens = answer.output_tokens_without_stop
    return str(tokenizer.decode(tokens, skip_special_tokens=gconfig.skip_special_tokens))
