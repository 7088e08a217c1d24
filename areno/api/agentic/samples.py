"""From what an agent returned for one task to a sample that can be rewarded and trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from areno.api.agentic.context import AgentContext
from areno.api.agentic.data import AgentItem
from areno.api.agentic.records import agent_record, sequence_of
from areno.api.agentic.trajectory import AgentTrajectory, AgentTrajectoryTurn, is_sequence
from areno.api.sampler import Sampler
from areno.errors import AgentError
from areno.rollouts.conversation.rows import TrajectoryRow, branches, build_rows
from areno.rollouts.conversation.spans import LossMaskPolicy
from areno.rollouts.conversation.tape import Turn
from areno.text.chat import encode_rendered, render_generation_prompt
from areno.types import Logprobs, RewardRecord, RolloutSequence


@dataclass(slots=True)
class AgentSample:
    """One task that was done.

    Attributes:
        item: the task.
        turns: the recorded answers that count, in the order in which they were returned.
        rows: what is trained on; several where the conversation forks or has several parts.
        record: what the reward function sees.
        sequence: all that the policy said, end to end.
        turn_rewards: what the environment gave for each turn; 0 where it gave nothing.
    """

    item: AgentItem
    turns: list[Turn]
    rows: list[TrajectoryRow]
    record: RewardRecord
    sequence: RolloutSequence
    turn_rewards: list[float]

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation."""
        return max(path[-1].length for path in branches(self.turns))

    @property
    def context_full(self) -> bool:
        """Whether a request found no room for an answer."""
        return any(turn.finish == "length" and not turn.tokens for turn in self.turns)

    @property
    def forks(self) -> list[str]:
        """Why conversations had to begin anew, once for each time."""
        return [turn.fork for turn in self.turns if turn.fork]


def make_sample(
    item: AgentItem,
    turns: Sequence[AgentTrajectoryTurn],
    context: AgentContext,
    policy: LossMaskPolicy,
    tokenizer: Any,
) -> AgentSample:
    """Look the answers up and build what training and rewards need.

    Args:
        item: the task.
        turns: what the agent returned for it, at least one.
        context: of the call that made them.
        policy: which tokens count.
        tokenizer: the model's.

    Raises:
        UsageError: the policy trains on context, and the tokenizer cannot tell its parts apart.
        ValueError: a response is none of this session's, belongs to another task, or was returned twice.
    """
    recorded: list[Turn] = []
    for turn in turns:
        found = context.turn(turn.turn_id, item) if turn.turn_id else _without_response(turn, recorded, tokenizer)
        if found in recorded:
            raise ValueError("the agent returned the same response twice; return each turn once")
        recorded.append(found)
    rows = build_rows(recorded, policy, tokenizer)
    record = agent_record(item, turns, recorded, rows, tokenizer)
    rewards = [turn.reward or 0.0 for turn in turns]
    return AgentSample(item, recorded, rows, record, sequence_of(recorded), rewards)


def fill_context_logprobs(trainer: Sampler, samples: Sequence[AgentSample], micro_bs: int = 8) -> None:
    """Give tokens that count but were not sampled the policy's log-prob of now, so that their ratio begins at 1.

    Args:
        trainer: holds the policy; running generation is waited for.
        samples: their rows are changed.
        micro_bs: rows of one forward pass.
    """
    rows = [row for sample in samples for row in sample.rows if row.lacks_logprobs]
    if not rows:
        return
    tokens, warmth = [row.tokens for row in rows], [row.temperature for row in rows]
    for row, scored in zip(
        rows, trainer.score_logprobs("actor", tokens, temperatures=warmth, micro_bs=micro_bs), strict=True
    ):
        marks = zip(row.logprobs, row.trained, row.sampled, scored, strict=True)
        row.logprobs = [new if counts and not said else old for old, counts, said, new in marks]
        row.context_scored = True


def _without_response(turn: AgentTrajectoryTurn, earlier: Sequence[Turn], tokenizer: Any) -> Turn:
    """A turn whose tokens the agent sampled through the trainer and not through the server."""
    messages = [dict(message) for message in turn.messages]
    rendered = render_generation_prompt(tokenizer, messages, tools=turn.tools or None)
    logprobs = turn.response_logprobs
    given, text, parent = encode_rendered(tokenizer, [rendered])[0], rendered.text, None
    for other in earlier:
        known = [*other.prompt, *other.tokens]
        if given[: len(known)] == known:
            parent, given, text = other, given[len(known) :], ""
            break
    return Turn(
        id="",
        parent=parent,
        given=given,
        given_text=text,
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
    """All turns that an agent returned: one turn, one trajectory, or lists of either.

    Raises:
        AgentError: it returned something else.
    """
    if isinstance(returned, AgentTrajectoryTurn):
        yield returned
    elif isinstance(returned, AgentTrajectory):
        yield from returned.turns
    elif is_sequence(returned) or isinstance(returned, Iterator):
        for part in returned:
            yield from turns_in(part)
    else:
        shown = "None" if returned is None else f"{type(returned).__name__} {returned!r:.80}"
        raise AgentError(
            f"the agent returned {shown}; return AgentTrajectory or AgentTrajectoryTurn objects, or a list of them"
        )
