"""Which stage of a pipeline computes what, and in which order.

After some forward passes to begin with, a stage makes a forward and a backward pass in turn, so that few activations wait for
their backward passes. With one run of layers per stage that is 1F1B (Narayanan et al. 2019, arXiv:1806.03377), with several
the interleaved form (Narayanan et al. 2021, arXiv:2104.04473), whose idle time is that of 1F1B divided by their number.
"""

from typing import NamedTuple


class Action(NamedTuple):
    """A forward or backward pass of one run of layers over one microbatch."""

    backward: bool
    run: int
    microbatch: int


Schedule = tuple[tuple[Action, ...], ...]
"""What each stage does, in order."""


def make_schedule(stages: int, chunks: int, microbatches: int, backward: bool = True) -> Schedule:
    """What each of ``stages`` does, each of which has ``chunks`` runs of layers; without ``backward`` forward passes alone.

    Run i belongs to stage i % ``stages``. As many microbatches as there are stages pass a stage's first run before any passes
    its next one; where the last of them are missing, they are left out of the same order.
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
    """What must be done before an action, where the last run of layers has that number; None if it can begin at once."""
    backward, run, microbatch = action
    if not backward:
        return Action(False, run - 1, microbatch) if run else None
    return Action(True, run + 1, microbatch) if run < last else Action(False, run, microbatch)
