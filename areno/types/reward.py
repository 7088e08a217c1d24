"""The input of reward functions: one record for each finished completion or trajectory."""

from dataclasses import dataclass, field
from typing import Any, Literal

RewardEventType = Literal["request", "assistant_text", "assistant_tool_call", "tool_result", "finish", "error"]


@dataclass(slots=True)
class RewardEvent:
    """One event of a trajectory."""

    type: RewardEventType
    text: str = ""
    name: str | None = None
    arguments: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RewardRecord:
    """Input of a reward function for one sample.

    Attributes:
        prompt: prompt text.
        completion: text that the model generated. The turns of an agent are joined by newlines.
        rendered_completion: for agents, the conversation up to the last answer, decoded with special tokens but without the
            first prompt. For other samples, equal to ``completion``.
        final_answer: text of the last assistant turn.
        answer: reference answer. It is ``solutions`` of the data row or, if missing, ``answer`` of the data row.
        messages: all messages of the conversation, including tool results.
        trace: events of the trajectory, in order.
        tool_calls: parsed calls, ``{"name", "arguments"}`` with arguments as a JSON string.
        tool_results: results of the tool calls, ``{"name", "tool_call_id", "content"}``.
        tokens: token ids of the response, without the prompt.
        logprobs: log-probs of the response tokens, recorded during the rollout.
        loss_mask: for each response token, whether the token is trained on.
        source_record: the data row.
        metadata: ``prompt_index``, ``sample_index`` and ``finish_reason``. For agents, also ``turns`` and ``turn_rewards``.
    """

    prompt: str = ""
    completion: str = ""
    rendered_completion: str = ""
    final_answer: str = ""
    answer: Any = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    trace: list[RewardEvent] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    tool_results: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    source_record: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
