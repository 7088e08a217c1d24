"""Several optimizer steps from the rows of one rollout: which rows each of them gets, and their statistics as one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Literal

from areno.engine.rollout.counter_rng import derive_seed, epoch_order
from areno.types import TrainSequence

Order = Literal["prompts", "rows"]
"""Of minibatches: each pass visits the prompts in a new order and never parts the rows of a prompt, or the first pass takes
the rows as they come and each later one in a new order."""


@dataclass(frozen=True, slots=True)
class Learner:
    """A model that takes optimizer steps on the rows of a rollout."""

    role: str  # names it
    train: Callable[[list[TrainSequence]], Mapping[str, float]]  # one train call; returns its statistics
    passes: int = 1  # times that every row is trained on
    minibatches: int = 1  # train calls of one pass
    first_step: int = 0  # step of the run from which on it is trained

    def learn(self, rows: Sequence[TrainSequence], *, order: Order, seed: int, step: int) -> dict[str, float]:
        """Train on the rows of a step; returns the statistics of all calls, see :func:`merge_stats`."""
        groups = [row.group for row in rows] if order == "prompts" else list(range(len(rows)))
        plan = plan_passes(groups, passes=self.passes, minibatches=self.minibatches, seed=seed, step=step, order=order)
        return merge_stats([self.train([rows[index] for index in indices]) for indices in plan])


def plan_passes(
    groups: Sequence[int], *, passes: int, minibatches: int, seed: int, step: int, order: Order = "prompts"
) -> list[list[int]]:
    """The row indices of each train call of one step, in the order of the calls.

    Each pass visits the groups in an order that is a function of ``seed``, ``step`` and the pass, and cuts them into
    minibatches of about equal numbers of rows, at most one per group. Rows of one group stay together. A single pass
    in a single minibatch keeps the rows as they are.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    count = min(minibatches, len(members))
    if passes == 1 and count == 1:
        return [list(range(len(groups)))]
    together, calls = list(members.values()), []
    for number in range(passes):
        shuffle = number > 0 or order == "prompts"
        places = epoch_order(len(together), epoch=number, seed=derive_seed(seed, step), shuffle=shuffle)
        calls += _cut([together[index] for index in places], count)
    return calls


def _cut(groups: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Join neighbours to ``count`` lists, none empty, with borders as near to equal numbers of rows as groups allow."""
    ends = list(accumulate(map(len, groups), initial=0))
    cuts = [0]
    for part in range(1, count):
        wanted = ends[-1] * part / count
        possible = range(cuts[-1] + 1, len(groups) - count + part + 1)
        cuts.append(min(possible, key=lambda cut: abs(ends[cut] - wanted)))
    cuts.append(len(groups))
    return [list(chain.from_iterable(groups[begin:end])) for begin, end in pairwise(cuts)]


def merge_stats(calls: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The statistics of a step's train calls as one set.

    Times (``*_time_s``) are added up. The gap between rollout and training (``logp_*``) is that of the first call,
    because later ones see a policy that has moved. The learning rate (``lr``) is that of the last. Of ``*/min`` and
    ``*/max`` the least and the greatest are taken. All else is the mean over the calls that report it.
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
