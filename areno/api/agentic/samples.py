"""Converts the turns of an agent's task to a sample. The sample contains the training rows and the reward record.

The reward function receives a ``RewardRecord`` for a single completion as well as for the conversation of an agent. For an
agent, additional fields of the record are set, such as ``tool_calls``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from areno.api.agentic.context import AgentContext
from areno.api.agentic.data import AgentItem, AgentTrajectory, AgentTrajectoryTurn
from areno.api.sampler import Sampler
from areno.errors import AgentError
from areno.rollouts.conversation.continuation import Turn
from areno.rollouts.conversation.history import text_of
from areno.rollouts.conversation.spans import LossMaskPolicy
from areno.rollouts.conversation.trajectory_rows import TrajectoryRow, branches, build_rows
from areno.text.chat import encode_rendered, render_generation_prompt
from areno.types import Logprobs, RewardEvent, RewardRecord, RolloutSequence


@dataclass(slots=True)
class AgentSample:
    """Training rows and reward record of one finished task, built from the task's turns."""

    item: AgentItem
    turns: list[Turn]  # the recorded turns that were returned, in order
    rows: list[TrajectoryRow]  # training rows; several if the conversation forks or its temperature changes
    record: RewardRecord  # input of the reward function
    sequence: RolloutSequence  # all generated tokens, concatenated
    turn_rewards: list[float]  # the environment's reward for each turn; 0 for turns without one

    @property
    def longest(self) -> int:
        """Number of tokens of the longest branch of the conversation."""
        return max(path[-1].length for path in branches(self.turns))

    @property
    def context_full(self) -> bool:
        """Whether a request filled the context and left no room for an answer."""
        return any(turn.finish == "length" and not turn.tokens for turn in self.turns)

    @property
    def forks(self) -> list[str]:
        """One reason per turn that continues the conversation but needs a new training row."""
        return [turn.fork for turn in self.turns if turn.fork]


def make_sample(
    item: AgentItem,
    turns: Sequence[AgentTrajectoryTurn],
    context: AgentContext,
    policy: LossMaskPolicy,
    tokenizer: Any,
) -> AgentSample:
    """Build the sample of a task from its recorded turns.

    Raises ValueError if a response in ``turns`` was not recorded in ``context``, belongs to another task, or appears twice.
    Also raises the UsageError of :func:`~areno.rollouts.conversation.trajectory_rows.build_rows`.
    """
    recorded: list[Turn] = []
    for turn in turns:
        answer = context.turn(turn.turn_id, item) if turn.turn_id else _without_response(turn, recorded, tokenizer)
        if answer in recorded:
            raise ValueError("the agent returned the same response twice; return each response once")
        recorded.append(answer)
    rows = build_rows(recorded, policy, tokenizer)
    sequence = _sequence_of(recorded)
    record = _record_of(item, turns, recorded, rows, sequence, tokenizer)
    return AgentSample(item, recorded, rows, record, sequence, [turn.reward or 0.0 for turn in turns])


def fill_context_logprobs(trainer: Sampler, samples: Sequence[AgentSample], micro_bs: int = 8) -> None:
    """Compute the policy's log-probs of tokens that are trained on but were not sampled by the policy.

    The log-probs are written to the samples' rows, so that the importance ratios of these tokens start at 1. The
    function waits until all running generation has finished.
    """
    rows = [row for sample in samples for row in sample.rows if row.lacks_logprobs]
    if not rows:
        return
    tokens, temperatures = [row.tokens for row in rows], [row.temperature for row in rows]
    records = [row.routed_experts for row in rows]
    routed = records if any(record is not None for record in records) else None
    scores = trainer.score_logprobs(
        "actor", tokens, temperatures=temperatures, micro_bs=micro_bs, routed_experts=routed
    )
    for row, scored in zip(rows, scores, strict=True):
        marks = zip(row.logprobs, row.trained, row.sampled, scored, strict=True)
        row.logprobs = [new if counts and not sampled else old for old, counts, sampled, new in marks]
        row.context_scored = True


def _without_response(turn: AgentTrajectoryTurn, earlier: Sequence[Turn], tokenizer: Any) -> Turn:
    """Build a :class:`Turn` from an answer that was generated with a method such as ``rollout_batch``, not by the server."""
    messages = [dict(message) for message in turn.messages]
    rendered = render_generation_prompt(tokenizer, messages, tools=turn.tools or None)
    logprobs = turn.response_logprobs
    tokens, text, parent = encode_rendered(tokenizer, [rendered])[0], rendered.text, None
    prefixes = ((len(prefix := [*other.prompt, *other.tokens]), prefix, other) for other in earlier)
    continued = [(length, other) for length, prefix, other in prefixes if tokens[:length] == prefix]
    if continued:
        length, parent = max(continued, key=lambda item: item[0])  # the last turn of this conversation so far
        tokens, text = tokens[length:], ""
    return Turn(
        id="",
        parent=parent,
        context_tokens=tokens,
        context_text=text,
        anchor="",
        prompt_text=rendered.text,
        messages=messages,
        tools=turn.tools,
        answer={
            "role": "assistant",
            "content": tokenizer.decode(turn.response_tokens, skip_special_tokens=True),
            "tool_calls": turn.parsed_tool_calls,
        },
        tokens=turn.response_tokens,
        logprobs=logprobs,
        versions=[-1] * len(turn.response_tokens),
        temperature=logprobs.temperature if isinstance(logprobs, Logprobs) else 1.0,
    )


def turns_in(returned: Any) -> Iterator[AgentTrajectoryTurn]:
    """Yield the turns in an agent's return value: a turn, a trajectory, or nested lists of turns and trajectories.

    Raises AgentError if the return value contains anything else.
    """
    if isinstance(returned, AgentTrajectoryTurn):
        yield returned
    elif isinstance(returned, AgentTrajectory):
        yield from returned.turns
    elif isinstance(returned, Sequence | Iterator) and not isinstance(returned, str | bytes):
        for part in returned:
            yield from turns_in(part)
    else:
        shown = "None" if returned is None else f"{type(returned).__name__} {returned!r:.80}"
        raise AgentError(
            f"the agent returned {shown}; return AgentTrajectory or AgentTrajectoryTurn objects, or a list of such objects"
        )


def _sequence_of(recorded: Sequence[Turn]) -> RolloutSequence:
    tokens = list(chain.from_iterable(turn.tokens for turn in recorded))
    return RolloutSequence(
        resp_tokens=tokens,
        resp_logprobs=list(chain.from_iterable(turn.logprobs for turn in recorded)),
        finish_reason=recorded[-1].finish,
        text="\n".join(text_of(turn.answer.get("content")) for turn in recorded),
        versions=list(chain.from_iterable(turn.versions for turn in recorded)),
        temperature=recorded[-1].temperature,
        cut_mass=sum(turn.cut_mass * len(turn.tokens) for turn in recorded) / max(len(tokens), 1),
    )


def _record_of(
    item: AgentItem,
    turns: Sequence[AgentTrajectoryTurn],
    recorded: Sequence[Turn],
    rows: Sequence[TrajectoryRow],
    sequence: RolloutSequence,
    tokenizer: Any,
) -> RewardRecord:
    last = recorded[-1]
    messages = _messages(turns[-1], last)
    solutions = item.record.get("solutions")
    return RewardRecord(
        prompt=item.prompt,
        completion=sequence.text,
        rendered_completion=_rendered(last, tokenizer),
        final_answer=text_of(last.answer.get("content")),
        answer=solutions if solutions is not None else item.record.get("answer"),
        messages=messages,
        trace=_trace(turns, recorded, messages),
        tool_calls=[call for turn in recorded for call in _calls(turn)],
        tool_results=_tool_results(messages),
        tokens=list(sequence.resp_tokens),
        logprobs=list(sequence.resp_logprobs),
        loss_mask=_counts(rows, recorded),
        source_record=item.record,
        metadata={
            "prompt_index": item.prompt_index,
            "sample_index": item.sample_index,
            "finish_reason": last.finish,
            "turns": len(recorded),
            "turn_rewards": [turn.reward for turn in turns],
        },
    )


def _tool_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
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
    """Return the conversation: the last request, its answer, and the messages that the agent added after the answer."""
    messages = [_plain(message) for message in turn.messages]
    sent = len(recorded.messages)
    if len(messages) > sent and messages[sent].get("role") == "assistant":
        return messages
    return [*messages, recorded.answer]


def _plain(message: Any) -> dict[str, Any]:
    if isinstance(message, dict):
        return message
    return dict(message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else message)


def _rendered(turn: Turn, tokenizer: Any) -> str:
    path = turn.path
    tokens = [token for step in path for token in (*step.context_tokens, *step.tokens)]
    return str(tokenizer.decode(tokens[len(path[0].context_tokens) :], skip_special_tokens=False))


def _calls(turn: Turn) -> list[dict[str, Any]]:
    functions = [call["function"] for call in turn.answer.get("tool_calls") or []]
    return [{"name": function["name"], "arguments": function["arguments"]} for function in functions]


def _counts(rows: Sequence[TrajectoryRow], recorded: Sequence[Turn]) -> list[bool]:
    """Return the loss mask of the sampled tokens, concatenated over all turns.

    A turn may be in several training rows, but contributes to the loss in at most one of them.
    """
    counts = [[False] * len(turn.tokens) for turn in recorded]
    for row in rows:
        marks: list[list[bool]] = [[] for _ in recorded]
        for sampled, trained, turn in zip(row.sampled, row.trained, row.turns, strict=True):
            if sampled and turn >= 0:
                marks[turn].append(trained)
        counts = [new if any(new) else old for old, new in zip(counts, marks, strict=True)]
    return list(chain.from_iterable(counts))


def _trace(
    turns: Sequence[AgentTrajectoryTurn], recorded: Sequence[Turn], messages: Sequence[dict[str, Any]]
) -> list[RewardEvent]:
    trace: list[RewardEvent] = []
    for turn, recorded_turn in zip(turns, recorded, strict=True):
        new = recorded_turn.messages[_already_traced(recorded_turn) :]
        trace += _results(new)
        trace.append(RewardEvent("request", messages=new, metadata={"tool_choice": turn.tool_choice}))
        text = text_of(recorded_turn.answer.get("content"))
        if text:
            trace.append(RewardEvent("assistant_text", text=text))
        for call in _calls(recorded_turn):
            trace.append(RewardEvent("assistant_tool_call", name=call["name"], arguments=call["arguments"]))
    trace += _results(messages[len(recorded[-1].messages) + 1 :])
    trace.append(RewardEvent("finish", text=recorded[-1].finish))
    return trace


def _already_traced(turn: Turn) -> int:
    """Return how many messages of a turn's request are already in trace events of earlier turns."""
    if turn.parent is not None:
        return len(turn.parent.messages) + 1
    answers = [index for index, message in enumerate(turn.messages) if message["role"] == "assistant"]
    return answers[-1] + 1 if turn.fork and answers else 0


def _results(messages: Sequence[dict[str, Any]]) -> list[RewardEvent]:
    return [
        RewardEvent("tool_result", name=r["name"], content=r["content"], metadata={"id": r["tool_call_id"]})
        for r in _tool_results(messages)
    ]
