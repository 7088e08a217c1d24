"""Pipeline schedules: the order of the passes of each stage.

After some warmup forward passes, a stage alternates between forward and backward passes. This order limits the activations in
memory. With one model chunk per stage, the schedule is 1F1B (Harlap et al. 2018, arXiv:1806.03377). With several chunks, the
schedule is interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473). Interleaving divides the bubble by the number of chunks.
"""

from typing import NamedTuple


class Action(NamedTuple):
    """A forward or backward pass of one model chunk over one microbatch."""

    backward: bool
    run: int  # index of the model chunk
    microbatch: int  # index of the microbatch


Schedule = tuple[tuple[Action, ...], ...]
"""For each stage, its forward and backward passes in the order in which the stage runs them."""


def make_schedule(stages: int, chunks: int, microbatches: int, backward: bool = True) -> Schedule:
    """Return the schedule of ``stages`` stages with ``chunks`` model chunks each.

    Without ``backward``, the schedule has only forward passes. Chunk i belongs to stage i % ``stages``. Each stage processes
    microbatches in groups of ``stages`` microbatches. A stage runs its first chunk for all microbatches of a group, then its
    second chunk for all microbatches of the group, and so on. An incomplete last group is ordered like a full group.
    """
    filled = -(-microbatches // stages) * stages
    schedule = []
    for stage in range(stages):
        runs = range(stage, stages * chunks, stages)
        actions = [Action(False, run, index) for run in runs for index in range(filled)]
        forward = sorted(actions, key=lambda action: _place(action, stages))
        if not backward:
            schedule.append(_present(forward, microbatches))
            continue
        backwards = sorted((action._replace(backward=True) for action in actions), key=lambda a: _place(a, stages))
        first = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
        order, rest = forward[:first], forward[first:]
        for index, action in enumerate(backwards):
            order += [*rest[index : index + 1], action]
        schedule.append(_present(order, microbatches))
    return tuple(schedule)


def _place(action: Action, stages: int) -> tuple[int, int, int]:
    chunk = action.run // stages
    return action.microbatch // stages, -chunk if action.backward else chunk, action.microbatch % stages


def _present(actions: list[Action], microbatches: int) -> tuple[Action, ...]:
    return tuple(action for action in actions if action.microbatch < microbatches)


def needed(action: Action, last: int) -> Action | None:
    """Return the pass whose result is the input of ``action``.

    A forward pass of the model's first chunk needs no other pass. In this case, return None. ``last`` is the index of the
    model's last chunk.
    """
    backward, run, microbatch = action
    if not backward:
        return Action(False, run - 1, microbatch) if run else None
    return Action(True, run + 1, microbatch) if run < last else Action(False, run, microbatch)
