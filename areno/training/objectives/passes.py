"""Divides the rows of one rollout into minibatches for several optimizer steps, and merges the minibatches' statistics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Literal

from areno.engine.rollout.counter_rng import derive_seed, epoch_order
from areno.types import TrainSequence

Order = Literal["prompts", "rows"]
"""Order in which a pass over the rows of a rollout visits the rows.

``prompts``: each pass shuffles the prompts and keeps the rows of a prompt together. ``rows``: the first pass keeps the order
of the rows, and later passes shuffle the rows.
"""


@dataclass(frozen=True, slots=True)
class Learner:
    """A model that takes optimizer steps on the rows of a rollout."""

    role: str
    train: Callable[[list[TrainSequence]], Mapping[str, float]]  # makes one train call and returns its statistics
    passes: int = 1  # passes over the rows
    minibatches: int = 1  # train calls per pass
    first_step: int = 0  # first step of the run at which the model is trained

    def learn(self, rows: Sequence[TrainSequence], *, order: Order, seed: int, step: int) -> dict[str, float]:
        """Train on the rows of a step. Return the statistics, merged by :func:`merge_stats`."""
        groups = [row.group for row in rows] if order == "prompts" else list(range(len(rows)))
        plan = plan_passes(groups, passes=self.passes, minibatches=self.minibatches, seed=seed, step=step, order=order)
        return merge_stats([self.train([rows[index] for index in indices]) for indices in plan])


def plan_passes(
    groups: Sequence[int], *, passes: int, minibatches: int, seed: int, step: int, order: Order = "prompts"
) -> list[list[int]]:
    """Return the row indices of each minibatch of a step, in order.

    ``groups`` contains the group number of each row. The caller must form one group per prompt or, with ``order="rows"``, one
    group per row. With ``order="prompts"``, each pass over the rows shuffles the groups. With ``order="rows"``, the first pass
    keeps the order of the groups, and each later pass shuffles the groups. The shuffled order depends only on ``seed``,
    ``step`` and the number of the pass. Each pass splits the groups into minibatches with about equal numbers of rows. Rows of
    one group stay together, so there are at most as many minibatches as groups. A single pass with a single minibatch keeps
    the order of the rows.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    count = min(minibatches, len(members))
    if passes == 1 and count == 1:
        return [list(range(len(groups)))]
    grouped, calls = list(members.values()), []
    for number in range(passes):
        shuffle = number > 0 or order == "prompts"
        permutation = epoch_order(len(grouped), epoch=number, seed=derive_seed(seed, step), shuffle=shuffle)
        calls += _split([grouped[index] for index in permutation], count)
    return calls


def _split(groups: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Split a sequence of groups into ``count`` minibatches, without splitting a group. Return the rows of each minibatch.

    Rows are given by their indices, and each group is a list of rows. A minibatch consists of one or more adjacent groups. The
    numbers of rows per minibatch are nearly equal.
    """
    ends = list(accumulate(map(len, groups), initial=0))
    cuts = [0]
    for part in range(1, count):
        target = ends[-1] * part / count
        candidates = range(cuts[-1] + 1, len(groups) - count + part + 1)
        cuts.append(min(candidates, key=lambda cut: abs(ends[cut] - target)))
    cuts.append(len(groups))
    return [list(chain.from_iterable(groups[begin:end])) for begin, end in pairwise(cuts)]


def merge_stats(calls: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the statistics of a step's minibatches.

    Times (``*_time_s``) are summed. The difference between the log-probs of rollout and training (``logp_*``) is from the first
    minibatch, before the policy changes. The learning rate (``lr``) is from the last minibatch. ``*/min`` and ``*/max`` are the
    minimum and the maximum over the minibatches. Every other statistic is the mean over the minibatches that report it.
    """
    merged = {}
    for name in dict.fromkeys(chain.from_iterable(calls)):
        values = [stats[name] for stats in calls if name in stats]
        if name.startswith("logp_"):
            merged[name] = values[0]
        elif name == "lr":
            merged[name] = values[-1]
        elif name.endswith(("/min", "/max")):
            merged[name] = min(values) if name.endswith("/min") else max(values)
        else:
            merged[name] = sum(values) / (1 if name.endswith("_time_s") else len(values))
    return merged
