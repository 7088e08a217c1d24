"""What an agent said under one key, with a reward for each answer, and which training rows that makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from areno.errors import UsageError
from areno.loss_fns.gae import discounted_returns
from areno.rollouts.conversation.rows import TrajectoryRow, build_rows
from areno.rollouts.conversation.spans import LossMaskPolicy
from areno.rollouts.conversation.tape import Turn

ExportStyle = Literal["individual", "concat"]


@dataclass(slots=True)
class Interaction:
    """One answer, or a whole conversation of them, as a training row.

    Attributes:
        id: the client's name of the answer; of the last one in a conversation.
        row: tokens, log-probs, versions and what is trained on.
        reward: after discounting.
        messages: what the answer was given, and the answer.
        num_turns: answers in the whole session.
    """

    id: str
    row: TrajectoryRow
    reward: float
    messages: list[dict[str, Any]]
    num_turns: int


def export_interactions(
    turns: Sequence[Turn], turn_discount: float, style: ExportStyle, tokenizer: Any
) -> dict[str, Interaction]:
    """The training rows of a session's turns, which are in the order in which they were given.

    ``individual`` makes every answer a row of its own, behind the prompt that it was given. ``concat`` makes one row of each
    conversation: answers that go on from one another stand in one row with all that was said, and the row has the reward
    of its last answer. A conversation that forks has a row for each end; what they share is trained on once. An answer earns
    its own reward (0 where it has none) and ``turn_discount`` times what the next one earns.
    """
    if style not in ("individual", "concat"):
        raise UsageError(f"agent.export_style {style!r} is unknown; use individual or concat")
    said = [turn for turn in turns if turn.tokens]
    returns = dict(zip(said, discounted_returns([turn.reward or 0.0 for turn in said], turn_discount), strict=True))
    if style == "individual":
        rows = [(turn, _alone(turn, tokenizer)) for turn in said]
    else:
        rows = [(said[max(row.turns)], row) for row in build_rows(said, LossMaskPolicy(), tokenizer)]
    return {
        f"{turn.response_id or turn.id}#{index}": Interaction(
            turn.response_id or turn.id, row, returns[turn], [*turn.messages, turn.answer], len(said)
        )
        for index, (turn, row) in enumerate(rows)
    }


def _alone(turn: Turn, tokenizer: Any) -> TrajectoryRow:
    whole = replace(turn, parent=None, given=turn.prompt)
    return build_rows([whole], LossMaskPolicy(), tokenizer)[0]


def is_interactions(result: Mapping[Any, Any]) -> bool:
    """Whether a workflow's mapping holds interactions and not tensors."""
    return bool(result) and all(isinstance(value, Interaction) for value in result.values())
