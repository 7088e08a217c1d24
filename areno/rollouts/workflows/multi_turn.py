"""A workflow with several attempts at one task. After a wrong answer, the model is told to try again.

This workflow has no tools. For tools, see :mod:`areno.rollouts.workflows.agents` (``areno run``) or :mod:`areno.api.agentic`
(``areno train``).
"""

from dataclasses import replace
from typing import Any

import torch

from areno.errors import DataError, UsageError
from areno.rollouts.conversation.recorder import ConversationRecorder
from areno.rollouts.conversation.spans import LossMaskPolicy
from areno.rollouts.conversation.trajectory_rows import build_rows
from areno.rollouts.engine_client import EngineClient, GenerationSettings, ModelRequest, ModelResponse
from areno.rollouts.trajectory import make_trajectory
from areno.rollouts.workflows.base import EpisodeResult, RolloutWorkflow
from areno.rollouts.workflows.rewards import AsyncReward, RewardFn, as_reward_call
from areno.rollouts.workflows.rlvr import ExtractPrompt, answer_text, extract_prompt
from areno.serving.recording import ChatPrompt, RecordedSample
from areno.text.chat import RenderedPrompt, render_generation_prompt
from areno.text.markers import warn_about_markers
from areno.types import GeneratedToken

TRY_AGAIN = (
    "Your answer is wrong, or it is not in the form that was asked for. Look for the mistake, and answer the original "
    "question again."
)


class MultiTurnWorkflow(RolloutWorkflow):
    """Generates answers until an answer has a reward other than 0, but at most ``max_turns`` answers.

    Each prompt reuses the sampled tokens of the earlier answers, so that the conversation becomes one training row. If the chat
    template rewrites the history, the conversation becomes several rows. The reward of each row is the last answer's reward
    times ``turn_discount ** (n - 1)``, where n is the number of answers.

    :class:`~areno.rollouts.workflows.rlvr.RLVRWorkflow` documents the other arguments.

    Args:
        reward_fn: function that scores every answer. Its argument ``completions`` is the latest answer.
        max_turns: maximum number of answers.
        turn_discount: factor in (0, 1] by which the reward is multiplied once per further attempt.
        retry_message: user message after a wrong answer.

    Raises:
        UsageError: a number is out of range.
    """

    def __init__(
        self,
        reward_fn: RewardFn | AsyncReward,
        gconfig: GenerationSettings,
        tokenizer: Any,
        max_turns: int,
        turn_discount: float = 1.0,
        enable_thinking: bool = False,
        data_extract_prompt_fn: ExtractPrompt = extract_prompt,
        retry_message: str = TRY_AGAIN,
    ) -> None:
        if max_turns < 1:
            raise UsageError(f"max_turns must be at least 1, got {max_turns}")
        if not 0 < turn_discount <= 1:
            raise UsageError(f"turn_discount must be in (0, 1], got {turn_discount}")
        self.reward, self.gconfig, self.tokenizer = as_reward_call(reward_fn), gconfig, tokenizer
        self.max_turns, self.turn_discount, self.enable_thinking = max_turns, turn_discount, enable_thinking
        self._prompt_of, self._retry = data_extract_prompt_fn, retry_message

    async def arun_episode(self, engine: EngineClient, data: dict[str, Any]) -> EpisodeResult:
        """See :meth:`RolloutWorkflow.arun_episode`."""
        prompt = self._prompt_of(data)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        warn_about_markers(self.tokenizer, messages, f"the row {str(prompt)[:80]!r}")
        recorder, reward = ConversationRecorder(self.tokenizer, 0), 0.0
        for _ in range(self.max_turns):
            turn = recorder.open(ChatPrompt(messages=messages, tools=[], render=self._render))
            try:
                answer = await engine.agenerate(ModelRequest(turn.prompt_tokens, self.gconfig))
            except DataError:
                if not recorder.turns:
                    raise
                break  # the conversation fills the context
            text = answer_text(answer, self.tokenizer, self.gconfig)
            turn.end(_recorded(answer, text))
            reward = await self.reward(turn.prompt_text, text, answer.input_tokens, answer.output_tokens, **data)
            if reward != 0:
                break
            messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": self._retry}]
        reward *= self.turn_discount ** (len(recorder.turns) - 1)
        rows = build_rows(recorder.turns, LossMaskPolicy(), self.tokenizer)
        trajectory = make_trajectory([(row, reward) for row in rows])
        return {**trajectory, "num_turns": torch.full((len(rows),), len(recorder.turns))}

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> RenderedPrompt:
        return render_generation_prompt(
            self.tokenizer, messages, not self.enable_thinking, add_generation_prompt=add_generation_prompt
        )

    async def aclose(self) -> None:
        """Close the reward workers."""
        self.reward.close()


def _recorded(answer: ModelResponse, text: str) -> RecordedSample:
    sampled = zip(answer.output_tokens, answer.output_logprobs, answer.output_versions, strict=True)
    tokens = [GeneratedToken(token, logprob, [], version, None) for token, logprob, version in sampled]
    return RecordedSample(
        message={"role": "assistant", "content": text},
        tokens=[*tokens[:-1], *(replace(last, routed_experts=answer.routed_experts) for last in tokens[-1:])],
        finish="length" if answer.stop_reason == "length" else "stop",
        by_token=answer.stop_reason == "stop" and answer.output_tokens[-1] in answer.stop_ids,
        temperature=answer.temperature,
        text=text,
        offsets=(),
        pieces=(),
        closer="",
    )
