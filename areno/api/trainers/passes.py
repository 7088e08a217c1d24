"""Several optimizer steps from the rows of one rollout: which rows each of them gets, and their statistics as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise

from areno.api.datasets import epoch_order
from areno.engine.rollout.counter_rng import derive_seed


def plan_passes(groups: Sequence[int], *, passes: int, minibatches: int, seed: int, step: int) -> list[list[int]]:
    """Plan the train calls of one step.

    Each pass visits the prompts in an order of its own, a function of ``seed``, ``step`` and the pass, and cuts them into
    minibatches of about equal numbers of rows. Rows of one prompt stay together. A single pass in a single minibatch
    keeps the rows as they are.

    Args:
        groups: prompt of each row.
        passes: times that every row is trained on.
        minibatches: train calls of one pass; with fewer prompts, one call per prompt.
        seed: seed of the run.
        step: step of the run.

    Returns:
        Row indices of each train call, in the order of the calls.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    count = min(minibatches, len(members))
    if passes == 1 and count == 1:
        return [list(range(len(groups)))]
    prompts, calls = list(members.values()), []
    for number in range(passes):
        order = epoch_order(len(prompts), epoch=number, seed=derive_seed(seed, step), shuffle=True)
        calls += _cut([prompts[index] for index in order], count)
    return calls


def _cut(prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Join neighbours to ``count`` lists, none empty, with borders as near to equal numbers of rows as prompts allow."""
    ends = list(accumulate(map(len, prompts), initial=0))
    cuts = [0]
    for part in range(1, count):
        wanted = ends[-1] * part / count
        possible = range(cuts[-1] + 1, len(prompts) - count + part + 1)
        cuts.append(min(possible, key=lambda cut: abs(ends[cut] - wanted)))
    cuts.append(len(prompts))
    return [list(chain.from_iterable(prompts[begin:end])) for begin, end in pairwise(cuts)]


def merge_stats(calls: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The statistics of a step's train calls as one set.

    Times (``*_time_s``) are added up. The gap between rollout and training (``logp_*``) is that of the first call,
    because later ones see a policy that has moved. The learning rate (``lr``) is that of the last. All else is the mean over
    the calls that report it.
    """
    merged = {}
    for name in dict.fromkeys(chain.from_iterable(calls)):
        values = [stats[name] for stats in calls if name in stats]
        if name.startswith("logp_"):
            merged[name] = values[0]
        elif name == "lr":
            merged[name] = values[-1]
        else:
            merged[name] = sum(values) / (1 if name.endswith("_time_s") else len(values))
    return merged
