"""What an agent returns: turns with the server's responses, and trajectories of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areno.api.agentic.data import AgentItem
from areno.types import Logprobs

METADATA = "areno"
"""Key of a response under which the server describes its tokens."""


@dataclass(slots=True)
class AgentTrajectoryTurn:
    """One answer of the model.

    Args:
        item: the task that it belongs to.
        messages: the conversation that was sent, in OpenAI's form.
        response: the server's response, whole or the last chunk of a stream: an object of the OpenAI client, or a mapping.
        response_tokens: sampled token ids; taken from the response where there is one.
        response_logprobs: their log-probs; likewise.
        parsed_tool_calls: calls of the answer, as OpenAI has them; likewise.
        model: the model's name in the request.
        tools: the tools of the request.
        tool_choice: that of the request.
        reward: what the environment gave for this turn; see ``--turn-discount``.

    Raises:
        ValueError: the response has no token metadata, so it is not from a rollout session; or tokens and log-probs
            differ in number.
    """

    item: AgentItem
    messages: list[dict[str, Any]]
    response: Any = None
    response_tokens: list[int] = field(default_factory=list)
    response_logprobs: list[float] = field(default_factory=list)
    parsed_tool_calls: list[Any] = field(default_factory=list)
    model: str = "policy"
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: Any = None
    reward: float | None = None

    def __post_init__(self) -> None:
        if self.response is not None:
            metadata = _metadata_of(self.response)
            self.response_tokens = list(metadata["response_tokens"])
            self.response_logprobs = list(metadata["response_logprobs"])
            if "temperature" in metadata:
                self.response_logprobs = Logprobs(self.response_logprobs, metadata["temperature"])
            self.parsed_tool_calls = _calls_of(self.response)
        if len(self.response_tokens) != len(self.response_logprobs):
            raise ValueError(
                f"AgentTrajectoryTurn has {len(self.response_tokens)} response tokens and {len(self.response_logprobs)} "
                "log-probs; every token needs one"
            )

    @property
    def turn_id(self) -> str | None:
        """Name of the recorded answer; None where tokens were given without a response."""
        return None if self.response is None else str(_metadata_of(self.response).get("turn"))


@dataclass(slots=True)
class AgentTrajectory:
    """Turns that belong together; those of different items may be mixed, each counts for its own."""

    turns: list[AgentTrajectoryTurn] = field(default_factory=list)


def _metadata_of(response: Any) -> Mapping[str, Any]:
    found = _get(response, METADATA)
    if not isinstance(found, Mapping) or "response_tokens" not in found or "response_logprobs" not in found:
        raise ValueError(
            f"the response ({type(response).__name__}) does not include Areno trajectory metadata (key {METADATA!r}): "
            "send requests to ctx.get_base_url() with ctx.api_key, and pass on what came back"
        )
    return found


def _calls_of(response: Any) -> list[Any]:
    choices = _get(response, "choices") or []
    message = _get(choices[0], "message") if choices else None
    return list(_get(message, "tool_calls") or [])


def _get(value: Any, name: str) -> Any:
    """An entry of a mapping, an attribute, or a field that a client's class does not declare."""
    if isinstance(value, Mapping):
        return value.get(name)
    extra = getattr(value, "model_extra", None)
    if isinstance(extra, Mapping) and name in extra:
        return extra[name]
    return getattr(value, name, None)


def is_sequence(value: Any) -> bool:
    """Whether a value is a list of things, and not a text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
