"""The door between the chat endpoints and who keeps conversations: a rollout session trains on what is recorded here.

Without a recorder every request stands alone. With one, the API key says which tape a request belongs to; the tape
chooses the prompt's tokens, because a conversation that goes on must continue the tokens that the model saw and said.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from areno.observability.session_tracer import Held
from areno.text.chat import RenderedPrompt
from areno.text.reasoning import ReasoningDelta
from areno.text.tool_calls import ContentDelta, ToolCallDelta
from areno.types import FinishReason, GeneratedToken, SamplingParams

Render = Callable[[list[dict[str, Any]], bool], RenderedPrompt]
"""Renders messages with the request's tools and template variables; the second argument adds the generation prompt."""

KEY_PREFIX = "/samples/"
"""Begins paths that carry an API key."""

Piece = ContentDelta | ReasoningDelta | ToolCallDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """What a request asks the model to answer."""

    messages: list[dict[str, Any]]  # as the client sent them
    tools: list[dict[str, Any]]  # what may be called, in OpenAI's form
    render: Render  # renders messages as this request would have them


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """One sample that has come to its end."""

    message: dict[str, Any]  # the assistant's message, as the client gets it
    tokens: Sequence[
        GeneratedToken
    ]  # what was sampled, the end token included; empty where the context was full before
    finish: FinishReason  # why it ended
    by_token: bool  # it ended at a stop token, and not at a stop string or the limit
    temperature: float  # that it was sampled at; 1 for greedy samples, as log-probs have it
    text: str  # visible text of the tokens
    offsets: Sequence[int]  # where the text of each token begins, in characters
    pieces: Sequence[Piece]  # what the text was read as, in order
    closer: str  # marker that ends the reasoning; empty where there is none
    response_id: str = ""  # what the client knows the answer by, without the prefix that says of what kind it is


class OpenTurn(Protocol):
    """One request while it is answered."""

    prompt_tokens: list[int]  # what the engine is given
    prompt_text: str  # the rendered prompt, which may open the reasoning

    def seeds(self, samples: int) -> list[int]:
        """Seeds of the samples where the request names none."""

    def end(self, answer: RecordedAnswer) -> dict[str, Any]:
        """Keep a sample; returns what the response says about it under the key ``areno``."""


class Tape(Protocol):
    """The conversations of one API key."""

    session: Held  # of the traces, that its requests belong to

    def open(self, prompt: ChatPrompt) -> OpenTurn:
        """A request begins; called from the thread that renders. Raises UsageError: the template refuses the messages."""

    def set_reward(self, reward: float, response_id: str | None = None) -> None:
        """Reward an answer; the latest one unless it is named. Raises ValueError: there is no such answer."""


class Recorder(Protocol):
    """Who keeps conversations."""

    sampling: SamplingParams  # what requests that do not say otherwise are sampled with
    context_limit: int | None  # most tokens of prompt and answer; None is the model's limit

    def tape(self, key: str) -> Tape | None:
        """The tape of an API key; None where the key is unknown or not valid any more."""


def sampling_defaults(sampling: SamplingParams) -> dict[str, Any]:
    """Fields of a request that stand for sampling parameters."""
    names = [
        *("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("stop", "stop_token_ids", "ignore_eos"),
    ]
    temperature = 0.0 if sampling.greedy else sampling.temperature
    return {"temperature": temperature, **{name: getattr(sampling, name) for name in names}}
