"""The interface through which the chat endpoints record conversations for training.

Without a recorder, requests are independent. With a recorder, the API key of a request selects a :class:`SessionRecorder`. The
session recorder stores the conversations of the key, and determines the tokens of each prompt. If a prompt continues a recorded
conversation, the session recorder reuses the tokens that the model has read and sampled, and appends the tokens of the new
messages. Tokenizing the whole conversation again could give different tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from areno.observability.session_tracer import SessionHandle
from areno.text.chat import RenderedPrompt
from areno.text.reasoning import ReasoningDelta
from areno.text.tool_calls import ContentDelta, ToolCallDelta
from areno.types import FinishReason, GeneratedToken, SamplingParams

Render = Callable[[list[dict[str, Any]], bool], RenderedPrompt]
"""Renders messages with the request's tools and template variables. The second argument is ``add_generation_prompt``."""

KEY_PREFIX = "/samples/"
"""Programs that accept only a base URL send the API key in the path: ``/samples/KEY/v1/...``."""

Piece = ContentDelta | ReasoningDelta | ToolCallDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """The prompt of a chat request."""

    messages: list[dict[str, Any]]  # messages in the format of chat templates
    tools: list[dict[str, Any]]  # tools in OpenAI's format
    render: Render  # renders messages with this request's tools and variables


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSample:
    """One finished sample."""

    message: dict[str, Any]  # the assistant's message, as sent to the client
    tokens: Sequence[GeneratedToken]  # sampled tokens, including the stop token; empty if the context was full
    finish: FinishReason
    by_token: bool  # whether a stop token ended the sample, not a stop string or the length limit
    temperature: float  # temperature of the log-probs: the sampling temperature, or 1 for greedy samples
    text: str  # visible text
    offsets: Sequence[int]  # character offset of each token in the text
    pieces: Sequence[Piece]  # the parsed text, in order
    closer: str  # marker that ends the reasoning; empty if the format has none
    response_id: str = ""  # id of the response, without its type prefix


class OpenTurn(Protocol):
    """One request in progress."""

    prompt_tokens: list[int]
    prompt_text: str  # the rendered prompt, which may open the reasoning

    def seeds(self, samples: int) -> list[int]:
        """Return the seeds of the samples. Called if the request does not set a seed."""

    def end(self, sample: RecordedSample) -> dict[str, Any]:
        """Record a finished sample, and return the ``areno`` field of the response."""


class SessionRecorder(Protocol):
    """Records the conversations of one API key."""

    session: SessionHandle  # tracing session of the requests

    def open(self, prompt: ChatPrompt) -> OpenTurn:
        """Open a turn. Called in a worker thread (see :meth:`Service.prepare`).

        Raises UsageError if the template rejects the messages.
        """

    def set_reward(self, reward: float, response_id: str | None = None) -> None:
        """Set the reward of a response, by default the latest response. Raises ValueError if the response does not exist."""


class Recorder(Protocol):
    """Records conversations, with one :class:`SessionRecorder` per API key."""

    sampling: SamplingParams  # default values of fields that a request does not set
    context_limit: int | None  # maximum tokens of prompt plus response; None: the model's limit

    def of_key(self, key: str) -> SessionRecorder | None:
        """Return the session recorder of an API key. None if the key is unknown or revoked."""


def sampling_defaults(sampling: SamplingParams) -> dict[str, Any]:
    """Convert ``sampling`` to request fields."""
    names = [
        *("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("stop", "stop_token_ids", "ignore_eos"),
    ]
    temperature = 0.0 if sampling.greedy else sampling.temperature
    return {"temperature": temperature, **{name: getattr(sampling, name) for name in names}}
