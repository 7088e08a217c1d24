"""Trajectories, which are the results of episodes, and their conversion to training rows.

A trajectory is a dictionary of tensors with n rows of L tokens. An episode with several turns may have several rows. The
values of these keys have the shape ``[n, L]``:

- ``input_ids``: int64.
- ``loss_mask``: 1 for tokens to train on; 0 for other tokens.
- ``logprobs``: float32; 0 for tokens that were not sampled.
- ``versions``: weight version of each sampled token; -1 for other tokens.
- ``attention_mask``: False for padding.

The values of these keys have the shape ``[n]``:

- ``rewards`` and ``temperature``.
- ``truncated``: whether the last answer ended at a length limit, according to the engine.
- ``num_turns``: number of turns, if the workflow counts turns.
- ``reward_parts/NAME``: a part of the reward.

If the routing of MoE layers was recorded, ``routed_experts`` has the shape ``[n, L, M, K]``, where M is the number of MoE
layers, and K is the number of experts per token (see :mod:`areno.types.routing`).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from areno.errors import UsageError
from areno.rollouts.conversation.trajectory_rows import TrajectoryRow
from areno.types import PARTS, TrainSequence, WeightedReward, parts_of

Trajectory = dict[str, Any]

_PER_TOKEN = {
    "input_ids": torch.int64,
    "loss_mask": torch.int64,
    "logprobs": torch.float32,
    "versions": torch.int64,
    "attention_mask": torch.bool,
}
_NEEDED = (*_PER_TOKEN, "rewards")
_PADDING = {"versions": -1}
_ROUTED = "routed_experts"
_CARRIED = {"prox_logp": "prox_logprobs", "teacher_logp": "teacher_logprobs", "ref_logp": "ref_logprobs"}


def make_trajectory(rows: Sequence[tuple[TrajectoryRow, float]]) -> Trajectory:
    """Convert rows and their rewards to a trajectory with tensors ``[n, L]``, padded on the right."""
    return stack(
        [
            {
                "input_ids": torch.tensor([row.tokens]),
                "loss_mask": torch.tensor([row.trained], dtype=torch.int64),
                "logprobs": torch.tensor([row.logprobs], dtype=torch.float32),
                "versions": torch.tensor([row.versions]),
                "attention_mask": torch.ones(1, len(row.tokens), dtype=torch.bool),
                "rewards": torch.tensor([reward], dtype=torch.float32),
                "truncated": torch.tensor([row.truncated]),
                "temperature": torch.tensor([row.temperature], dtype=torch.float32),
                **({} if row.routed_experts is None else {_ROUTED: torch.from_numpy(row.routed_experts)[None]}),
                **{PARTS + name: torch.tensor([part], dtype=torch.float32) for name, part in parts_of(reward).items()},
            }
            for row, reward in rows
        ]
    )


def stack(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Concatenate trajectories, and pad them on the right to the length of the longest trajectory.

    Raises:
        UsageError: the keys of the trajectories differ.
    """
    if len(trajectories) == 1:
        return trajectories[0]
    trajectories = _all_routed(trajectories)
    names = set(trajectories[0])
    for other in trajectories[1:]:
        if set(other) != names:
            odd = ", ".join(sorted(names ^ set(other)))
            raise UsageError(
                f"some trajectories of a group lack the keys {odd}; return the same keys from each episode"
            )
    return {name: _stacked(name, [trajectory[name] for trajectory in trajectories]) for name in trajectories[0]}


def _stacked(name: str, parts: list[Any]) -> Any:
    if not isinstance(parts[0], Tensor):
        return [item for part in parts for item in part]
    if parts[0].ndim < 2:
        return torch.cat(parts)
    longest = max(part.shape[1] for part in parts)
    padding = torch.iinfo(parts[0].dtype).max if name == _ROUTED else _PADDING.get(name, 0)
    return torch.cat([_longer(part, longest, padding) for part in parts])


def _longer(values: Tensor, length: int, padding: int) -> Tensor:
    """Pad values [n, L, ...] to ``length`` tokens."""
    after = (0, 0) * (values.ndim - 2)
    return torch.nn.functional.pad(values, (*after, 0, length - values.shape[1]), value=padding)


def _all_routed(trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
    like = next((trajectory[_ROUTED] for trajectory in trajectories if _ROUTED in trajectory), None)
    if like is None:
        return trajectories
    missing = torch.iinfo(like.dtype).max
    return [
        {_ROUTED: like.new_full((*trajectory["input_ids"].shape, *like.shape[2:]), missing), **trajectory}
        for trajectory in trajectories
    ]


def check_trajectory(trajectory: Any) -> None:
    """Raise UsageError if a trajectory is invalid.

    A valid trajectory has all required keys with the right shapes. Its log-probs and rewards are finite, and its loss mask
    marks only sampled tokens.
    """
    if not isinstance(trajectory, dict):
        raise UsageError(
            f"a workflow returned {type(trajectory).__name__}; return None, a dict of tensors, or a dict of "
            "Interaction objects"
        )
    missing = [name for name in _NEEDED if name not in trajectory]
    if missing:
        raise UsageError(
            f"a workflow's trajectory lacks the keys {', '.join(missing)} and has only {', '.join(map(str, trajectory))}"
        )
    for name in _NEEDED:
        if not isinstance(trajectory[name], Tensor):
            raise UsageError(f"a trajectory's entry `{name}` is a {type(trajectory[name]).__name__}; make it a tensor")
    shape = trajectory["input_ids"].shape
    if len(shape) != 2 or not shape[1]:
        raise UsageError(f"a trajectory's entry `input_ids` has the shape {list(shape)}; make it [samples, tokens]")
    for name in _PER_TOKEN:
        if trajectory[name].shape != shape:
            raise UsageError(
                f"a trajectory's entry `{name}` has the shape {list(trajectory[name].shape)}, but `input_ids` has "
                f"{list(shape)}; give both the same shape"
            )
    if trajectory["rewards"].shape != shape[:1]:
        raise UsageError(
            f"a trajectory's entry `rewards` has the shape {list(trajectory['rewards'].shape)}; make it [{shape[0]}]"
        )
    for name in ("logprobs", "rewards"):
        if not bool(torch.isfinite(trajectory[name]).all()):
            raise UsageError(
                f"a trajectory's entry `{name}` contains a number that is not finite; return finite numbers"
            )
    if bool((trajectory["loss_mask"].bool() & (trajectory["versions"] < 0)).any()):
        raise UsageError(
            "a trajectory's entry `loss_mask` marks tokens that were not sampled (version below 0); set the mask to 0 for "
            "these tokens"
        )


def samples_of(trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    """Yield each row without padding, as a dictionary with the tensor keys of the trajectory.

    Tensors of shape ``[n]`` become numbers, tensors of shape ``[n, L]`` become lists, and tensors with more axes become arrays.
    """
    tensors = {name: values for name, values in trajectory.items() if isinstance(values, Tensor)}
    for index, keep in enumerate(trajectory["attention_mask"].bool()):
        yield {name: _of_row(values[index], keep) for name, values in tensors.items()}


def _of_row(values: Tensor, keep: Tensor) -> Any:
    if values.ndim == 0:
        return values.item()
    return values[keep].tolist() if values.ndim == 1 else values[keep].numpy()


def train_sequences(trajectories: Iterable[Trajectory], eos_token_id: int) -> list[TrainSequence]:
    """Return the training rows of a batch. The rows of one trajectory form one group.

    A trajectory has the rows of all accepted samples of a prompt. If samples were rejected, the group has fewer samples.

    If a trajectory has log-probs under other policies (``prox_logp``, ``teacher_logp``, ``ref_logp``), its rows get them too.
    """
    sequences = []
    for group, trajectory in enumerate(trajectories):
        for row in samples_of(trajectory):
            sequence = trajectory_row(row).train_sequence(reward=reward_of(row), group=group, eos_token_id=eos_token_id)
            for key in _CARRIED.keys() & row.keys():
                setattr(sequence, _CARRIED[key], row[key])
            sequences.append(sequence)
    return sequences


def reward_of(row: dict[str, Any]) -> float:
    """Return the reward of a row that :func:`samples_of` has yielded. If the row has reward parts, the result is a
    :class:`WeightedReward` with these parts."""
    parts = {key.removeprefix(PARTS): value for key, value in row.items() if key.startswith(PARTS)}
    return WeightedReward(row["rewards"], parts) if parts else row["rewards"]


def trajectory_row(row: dict[str, Any]) -> TrajectoryRow:
    """Convert a row of :func:`samples_of` to a :class:`TrajectoryRow`.

    A negative weight version marks a token that the model did not sample, such as a prompt token.
    """
    sampled = [version >= 0 for version in row["versions"]]
    ends = [before and not after for before, after in pairwise([False, *sampled])]
    return TrajectoryRow(
        tokens=row["input_ids"],
        sampled=sampled,
        trained=[bool(mark) for mark in row["loss_mask"]],
        turns=list(accumulate(map(int, ends))),
        logprobs=row["logprobs"],
        versions=row["versions"],
        temperature=row.get("temperature", 1.0),
        truncated=bool(row.get("truncated", False)),
        routed_experts=row.get(_ROUTED),
        roles=lambda: ["text" if is_sampled else "user" for is_sampled in sampled],
        context_scored=True,
    )
