"""From recorded turns to rows of training tokens: what the model saw and said, in one line per branch.

Turns that go on from one another share a row. Where a conversation forks, each branch is a row of its own, and what
they have in common is trained on in the first of them alone. A row has one temperature; turns that were sampled at
another one count in a row of theirs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from areno.errors import UsageError
from areno.rollouts.conversation.continuation import Turn
from areno.rollouts.conversation.spans import LossMaskPolicy, Role, given_mask, given_roles, sampled_mask, sampled_roles
from areno.types import RolloutSequence, TrainSequence
from areno.types.routing import RoutingRecord, continued


@dataclass(slots=True)
class TrajectoryRow:
    """One row; all lists have one entry per token."""

    tokens: list[int]
    sampled: list[bool]  # the policy said the token
    trained: list[bool]  # it counts in the loss
    turns: list[int]  # turn of the sample it belongs to, from 0; for given tokens the turn that they were given for
    logprobs: list[float]  # rollout log-probs of sampled tokens, 0 elsewhere unless filled in
    versions: list[int]  # weight versions of sampled tokens, -1 elsewhere
    temperature: float  # that the log-probs refer to
    truncated: bool  # the last answer ended at the token limit
    roles: Callable[[], list[Role]]  # of the tokens; looked up only where needed
    routed_experts: RoutingRecord | None = None  # of all tokens, where routers' choices are recorded
    context_scored: bool = False  # tokens that count and were not sampled have got the policy's log-probs

    @property
    def lacks_logprobs(self) -> bool:
        """Whether tokens count that were not sampled, and therefore have no rollout log-prob, nor another one yet."""
        marks = zip(self.trained, self.sampled, strict=True)
        return not self.context_scored and any(counts and not said for counts, said in marks)

    def train_sequence(self, *, reward: float, group: int, eos_token_id: int) -> TrainSequence:
        """The row as training takes it, without advantages; UsageError if tokens count that have no log-prob."""
        if self.lacks_logprobs:
            raise UsageError(
                "a row trains on tokens that were not sampled (LossMaskPolicy), and they have no log-probs yet: take samples "
                "from ctx.samples(), or give them to areno.api.agentic.samples.fill_context_logprobs(trainer, samples)"
            )
        prompt = [not (said or counts) for said, counts in zip(self.sampled, self.trained, strict=True)]
        plain = all(counts != masked for counts, masked in zip(self.trained, prompt, strict=True))
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
    """The rows of one sample's turns, without those that have nothing to train on.

    Raises UsageError: the policy trains on context, and the tokenizer cannot tell its parts apart.
    """
    places = {turn: place for place, turn in enumerate(turns)}
    rows: list[TrajectoryRow] = []
    done: set[Turn] = set()
    for path in branches(turns):
        fresh = [turn for turn in path if turn in places and turn not in done]
        done.update(fresh)
        for temperature in dict.fromkeys(turn.temperature for turn in fresh):
            counted = {turn for turn in fresh if turn.temperature == temperature}
            row = _row(path, counted, places, temperature, policy, tokenizer)
            if any(row.trained[1:]):
                rows.append(row)
    return rows


def branches(turns: Sequence[Turn]) -> list[list[Turn]]:
    """The conversations of a sample, each from its first turn to its last."""
    paths = [_own_path(turn, turns) for turn in turns]
    inner = {turn for path in paths for turn in path[:-1]}
    return [path for path in paths if path[-1] not in inner]


def _own_path(turn: Turn, turns: Sequence[Turn]) -> list[Turn]:
    """The path to a turn, over the sample's own turns where another sample, under the same API key, said the very same."""
    own = set(turns)
    path: list[Turn] = []
    for step in turn.path:
        if step not in own:
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
) -> TrajectoryRow:
    row = TrajectoryRow(
        [], [], [], [], [], [], temperature, path[-1].finish == "length", lambda: _roles(path, tokenizer)
    )
    for turn in path:
        given, said = len(turn.given), len(turn.tokens)
        counts = turn in counted
        row.tokens += [*turn.given, *turn.tokens]
        row.sampled += [False] * given + [True] * said
        row.trained += given_mask(turn, policy, tokenizer) if counts else [False] * given
        row.trained += sampled_mask(turn, policy, turn is path[-1]) if counts else [False] * said
        row.turns += [places.get(turn, -1)] * (given + said)
        row.logprobs += [0.0] * given + turn.logprobs
        row.versions += [-1] * given + turn.versions
    row.routed_experts = continued((turn.routed_experts for turn in path), len(row.tokens))
    return row


def _roles(path: Sequence[Turn], tokenizer: Any) -> list[Role]:
    return [role for turn in path for role in (*given_roles(turn, tokenizer), *sampled_roles(turn))]


def completion_row(prompt: Sequence[int], sequence: RolloutSequence) -> TrajectoryRow:
    """The row of a prompt's completion."""
    given, said = len(prompt), len(sequence.resp_tokens)
    given_as_user: list[Role] = ["user"] * given
    said_as_text: list[Role] = ["text"] * said
    return TrajectoryRow(
        tokens=[*prompt, *sequence.resp_tokens],
        sampled=[False] * given + [True] * said,
        trained=[False] * given + [True] * said,
        turns=[0] * (given + said),
        logprobs=[0.0] * given + sequence.resp_logprobs,
        versions=[-1] * given + (sequence.versions or [-1] * said),
        temperature=sequence.temperature,
        truncated=sequence.finish_reason == "length",
        roles=lambda: [*given_as_user, *said_as_text],
        routed_experts=continued([sequence.routed_experts], given + said),
    )


def known_roles(row: TrajectoryRow) -> Sequence[str] | None:
    """The role of each token; None where the tokenizer cannot tell the parts of a prompt apart."""
    try:
        return row.roles()
    except UsageError:
        return None
