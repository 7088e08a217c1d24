"""What a reward function sees of an agent's sample: the same record as for a prompt completion, with more in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areno.api.agentic.data import AgentItem
from areno.api.agentic.trajectory import AgentTrajectoryTurn
from areno.rollouts.conversation.history import text_of
from areno.rollouts.conversation.rows import TrajectoryRow
from areno.rollouts.conversation.tape import Turn
from areno.types import RewardEvent, RewardRecord, RolloutSequence


def agent_record(
    item: AgentItem,
    turns: Sequence[AgentTrajectoryTurn],
    recorded: Sequence[Turn],
    rows: Sequence[TrajectoryRow],
    tokenizer: Any,
) -> RewardRecord:
    """The record of one sample.

    Args:
        item: its task.
        turns: what the agent returned.
        recorded: the recorded answers of these turns, in the same order.
        rows: its training rows; they say which tokens count.
        tokenizer: the model's.
    """
    texts = [text_of(turn.answer.get("content")) for turn in recorded]
    messages = _messages(turns[-1], recorded[-1])
    counts = _counts(rows, len(recorded))
    solutions = item.record.get("solutions")
    return RewardRecord(
        prompt=item.prompt,
        completion="\n".join(texts),
        rendered_completion=_rendered(recorded[-1], tokenizer),
        final_answer=texts[-1],
        answer=solutions if solutions is not None else item.record.get("answer"),
        messages=messages,
        trace=_trace(turns, recorded, messages),
        tool_calls=[call for turn in recorded for call in _calls(turn)],
        tool_results=tool_results(messages),
        tokens=[token for turn in recorded for token in turn.tokens],
        logprobs=[logprob for turn in recorded for logprob in turn.logprobs],
        loss_mask=[
            mark for turn, marks in zip(recorded, counts, strict=True) for mark in marks or [False] * len(turn.tokens)
        ],
        source_record=item.record,
        metadata={
            "prompt_index": item.prompt_index,
            "sample_index": item.sample_index,
            "finish_reason": recorded[-1].finish,
            "turns": len(recorded),
            "turn_rewards": [turn.reward for turn in turns],
        },
    )


def sequence_of(recorded: Sequence[Turn]) -> RolloutSequence:
    """All that the policy said in a sample, end to end."""
    return RolloutSequence(
        resp_tokens=[token for turn in recorded for token in turn.tokens],
        resp_logprobs=[logprob for turn in recorded for logprob in turn.logprobs],
        finish_reason=recorded[-1].finish,
        text="\n".join(text_of(turn.answer.get("content")) for turn in recorded),
        versions=[version for turn in recorded for version in turn.versions],
        temperature=recorded[-1].temperature,
        cut_mass=sum(turn.cut_mass * len(turn.tokens) for turn in recorded)
        / max(sum(len(t.tokens) for t in recorded), 1),
    )


def tool_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What tools have returned, ``{"name", "tool_call_id", "content"}`` each."""
    names = {
        call.get("id"): call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls") or []
        if isinstance(call, dict) and isinstance(call.get("function"), dict)
    }
    return [
        {
            "name": message.get("name") or names.get(message.get("tool_call_id")),
            "tool_call_id": message.get("tool_call_id"),
            "content": text_of(message.get("content")),
        }
        for message in messages
        if message.get("role") == "tool"
    ]


def _messages(turn: AgentTrajectoryTurn, recorded: Turn) -> list[dict[str, Any]]:
    """The conversation with its last answer; what the agent has added behind that stays."""
    given = [_plain(message) for message in turn.messages]
    sent = len(recorded.messages)
    if len(given) > sent and given[sent].get("role") == "assistant":
        return given
    return [*given, recorded.answer]


def _plain(message: Any) -> dict[str, Any]:
    """A message as a mapping; agents append the client's objects as they are."""
    if isinstance(message, dict):
        return message
    return dict(message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else message)


def _rendered(turn: Turn, tokenizer: Any) -> str:
    """The last conversation behind its first prompt, as the model saw it."""
    path = turn.path
    tokens = [token for step in path for token in (*step.given, *step.tokens)]
    return str(tokenizer.decode(tokens[len(path[0].given) :], skip_special_tokens=False))


def _calls(turn: Turn) -> list[dict[str, Any]]:
    functions = [call["function"] for call in turn.answer.get("tool_calls") or []]
    return [{"name": function["name"], "arguments": function["arguments"]} for function in functions]


def _counts(rows: Sequence[TrajectoryRow], turns: int) -> list[list[bool]]:
    """For each turn which of its sampled tokens count; a turn counts in one row at most."""
    found: list[list[bool]] = [[] for _ in range(turns)]
    for row in rows:
        marks: list[list[bool]] = [[] for _ in range(turns)]
        for said, counts, turn in zip(row.sampled, row.trained, row.turns, strict=True):
            if said and turn >= 0:
                marks[turn].append(counts)
        found = [mine if not any(new) else new for mine, new in zip(found, marks, strict=True)]
    return found


def _trace(
    turns: Sequence[AgentTrajectoryTurn], recorded: Sequence[Turn], messages: Sequence[dict[str, Any]]
) -> list[RewardEvent]:
    trace: list[RewardEvent] = []
    for turn, kept in zip(turns, recorded, strict=True):
        new = kept.messages[_known(kept) :]
        trace += _results(new)
        trace.append(RewardEvent("request", messages=new, metadata={"tool_choice": turn.tool_choice}))
        text = text_of(kept.answer.get("content"))
        if text:
            trace.append(RewardEvent("assistant_text", text=text))
        for call in _calls(kept):
            trace.append(RewardEvent("assistant_tool_call", name=call["name"], arguments=call["arguments"]))
    trace += _results(messages[len(recorded[-1].messages) + 1 :])
    trace.append(RewardEvent("finish", text=recorded[-1].finish))
    return trace


def _known(turn: Turn) -> int:
    """How many of a request's messages earlier events have told already."""
    if turn.parent is not None:
        return len(turn.parent.messages) + 1
    said = [place for place, message in enumerate(turn.messages) if message["role"] == "assistant"]
    return said[-1] + 1 if turn.fork and said else 0


def _results(messages: Sequence[dict[str, Any]]) -> list[RewardEvent]:
    return [
        RewardEvent("tool_result", name=found["name"], content=found["content"], metadata={"id": found["tool_call_id"]})
        for found in tool_results(messages)
    ]
