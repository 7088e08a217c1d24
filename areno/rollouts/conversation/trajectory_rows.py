"""Converts recorded turns to training rows. A row has the prompt tokens and sampled tokens of one branch of a conversation.

Consecutive turns share a row. If a conversation forks, each branch becomes a separate row. Only the first branch trains on the
common prefix. If prompt messages count in the loss (see :class:`LossMaskPolicy`), a message counts only in the first row that
contains it. Turns that were sampled at different temperatures become separate rows.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from areno.errors import UsageError
from areno.rollouts.conversation.continuation import Turn
from areno.rollouts.conversation.spans import (
    LossMaskPolicy,
    Role,
    context_mask,
    context_roles,
    sampled_mask,
    sampled_roles,
)
from areno.types import RolloutSequence, TrainSequence
from areno.types.routing import RoutingRecord, continued


@dataclass(slots=True)
class TrajectoryRow:
    """A training row. Each list has one entry per token."""

    tokens: list[int]
    sampled: list[bool]  # whether the policy sampled the token
    trained: list[bool]  # whether the token counts in the loss
    turns: list[int]  # index of the token's turn (-1: another sample's); prompt tokens: the turn that answers them
    logprobs: list[float]  # rollout log-probs of sampled tokens, 0 elsewhere unless filled in
    versions: list[int]  # weight versions of sampled tokens, -1 elsewhere
    temperature: float  # temperature of the log-probs
    truncated: bool  # whether the last answer ended at the token limit
    roles: Callable[[], list[Role]]  # returns the roles of the tokens, computed on demand
    routed_experts: RoutingRecord | None = None  # for all tokens, if routing is recorded
    context_scored: bool = False  # whether trained tokens that were not sampled have log-probs

    @property
    def lacks_logprobs(self) -> bool:
        """Whether some tokens that count in the loss have no log-probs, because the policy did not sample these tokens."""
        marks = zip(self.trained, self.sampled, strict=True)
        return not self.context_scored and any(trained and not sampled for trained, sampled in marks)

    def train_sequence(self, *, reward: float, group: int, eos_token_id: int) -> TrainSequence:
        """Convert the row to a :class:`TrainSequence` without advantages.

        Raises UsageError if the row trains on tokens without log-probs.
        """
        if self.lacks_logprobs:
            raise UsageError(
                "the loss mask of a training row includes tokens that the policy did not sample (see LossMaskPolicy), and "
                "these tokens have no log-probs yet; use samples that `ctx.samples()` returned, or call "
                "`areno.api.agentic.samples.fill_context_logprobs(trainer, samples)`"
            )
        prompt = [not (sampled or trained) for sampled, trained in zip(self.sampled, self.trained, strict=True)]
        plain = all(trained != masked for trained, masked in zip(self.trained, prompt, strict=True))
        return TrainSequence(
            prompt_mask=prompt,
            tokens=self.tokens,
            logprobs=self.logprobs,
            reward=reward,
            eos_token_id=eos_token_id,
            loss_mask=None if plain else self.trained,
            temperature=self.temperature,
            group=group,
            truncated=self.truncated,
            versions=self.versions,
            routed_experts=self.routed_experts,
        )


def build_rows(turns: Sequence[Turn], policy: LossMaskPolicy, tokenizer: Any) -> list[TrajectoryRow]:
    """Build the training rows from the turns of one sample. Rows without any token that counts in the loss are omitted.

    Raises:
        UsageError: prompt tokens count in the loss under ``policy``, but the tokenizer cannot map tokens to text.
    """
    places = {turn: place for place, turn in enumerate(turns)}
    rows: list[TrajectoryRow] = []
    done: set[Turn] = set()
    seen: set[int] = set()  # keys of the messages in earlier rows
    for path in branches(turns):
        fresh = [turn for turn in path if turn in places and turn not in done]
        done.update(fresh)
        for temperature in dict.fromkeys(turn.temperature for turn in fresh):
            counted = {turn for turn in fresh if turn.temperature == temperature}
            row = _row(path, counted, places, temperature, policy, tokenizer, seen)
            if any(row.trained[1:]):
                rows.append(row)
        seen.update(key for turn in fresh for key in turn.keys)
    return rows


def branches(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Return the branches of a sample's conversations.

    Several turns can continue the same turn, so the turns form trees. A branch lists the turns from a root to a leaf of a tree.
    """
    paths = [_own_path(turn, turns) for turn in turns]
    inner = {turn for path in paths for turn in path[:-1]}
    return [path for path in paths if path[-1] not in inner]


def _own_path(turn: Turn, turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns from the root to ``turn``, which is one of a sample's ``turns``.

    If a turn on this path belongs to another sample, it is replaced by the turn in ``turns`` that has the same prompt tokens
    and sampled tokens, if there is one.
    """
    own_turns = set(turns)
    path: list[Turn] = []
    for step in turn.path:
        if step not in own_turns:
            same = (other for other in turns if other.tokens == step.tokens and other.prompt == step.prompt)
            step = next(same, step)
        path.append(step)
    return path


def _row(
    path: Sequence[Turn],
    counted: set[Turn],
    places: dict[Turn, int],
    temperature: float,
    policy: LossMaskPolicy,
    tokenizer: Any,
    seen: Container[int],
) -> TrajectoryRow:
    row = TrajectoryRow(
        [], [], [], [], [], [], temperature, path[-1].finish == "length", lambda: _roles(path, tokenizer)
    )
    for turn in path:
        prompt_len, answer_len = len(turn.context_tokens), len(turn.tokens)
        counts = turn in counted
        row.tokens += [*turn.context_tokens, *turn.tokens]
        row.sampled += [False] * prompt_len + [True] * answer_len
        row.trained += context_mask(turn, policy, tokenizer, seen) if counts else [False] * prompt_len
        row.trained += sampled_mask(turn, policy, turn is path[-1]) if counts else [False] * answer_len
        row.turns += [places.get(turn, -1)] * (prompt_len + answer_len)
        row.logprobs += [0.0] * prompt_len + turn.logprobs
        row.versions += [-1] * prompt_len + turn.versions
    row.routed_experts = continued((turn.routed_experts for turn in path), len(row.tokens))
    return row


def _roles(path: Sequence[Turn], tokenizer: Any) -> list[Role]:
    return [role for turn in path for role in (*context_roles(turn, tokenizer), *sampled_roles(turn))]


def completion_row(prompt: Sequence[int], sequence: RolloutSequence) -> TrajectoryRow:
    """Return a training row that consists of a prompt and its completion."""
    prompt_len, answer_len = len(prompt), len(sequence.resp_tokens)
    prompt_roles: list[Role] = ["user"] * prompt_len
    answer_roles: list[Role] = ["text"] * answer_len
    return TrajectoryRow(
        tokens=[*prompt, *sequence.resp_tokens],
        sampled=[False] * prompt_len + [True] * answer_len,
        trained=[False] * prompt_len + [True] * answer_len,
        turns=[0] * (prompt_len + answer_len),
        logprobs=[0.0] * prompt_len + sequence.resp_logprobs,
        versions=[-1] * prompt_len + (sequence.versions or [-1] * answer_len),
        temperature=sequence.temperature,
        truncated=sequence.finish_reason == "length",
        roles=lambda: [*prompt_roles, *answer_roles],
        routed_experts=continued([sequence.routed_experts], prompt_len + answer_len),
    )


def known_roles(row: TrajectoryRow) -> Sequence[str] | None:
    """Return the role of each token of a row. None if the tokenizer cannot map prompt tokens to text."""
    try:
        return row.roles()
    except UsageError:
        return None
