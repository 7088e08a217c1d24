"""How many episodes may run, so that what is trained on was said by weights that are not too old.

Episodes are counted, one per prompt group, and admitted by two limits at once:

    capacity = min( max(1, max_concurrent) - running,
                    (max_head_offpolicyness + version + 1) * max(1, consumer_batch_size) - (accepted + running) )

An episode that is admitted at version ``v`` has fewer than ``(eta + v + 1) * batch`` others before it. If batches were taken
in the order of admission, it would be used at version ``eta + v`` at the latest. That is a promise at the door only: an
episode that runs for long is overtaken by others. :func:`too_old` is the promise at the exit, for each single trajectory.
"""

import threading
from dataclasses import dataclass, replace
from typing import Any

from areno.errors import UsageError


@dataclass(slots=True)
class RolloutStat:
    """Episodes that wait for capacity and that run now; and what became of all since the beginning of training."""

    enqueued: int = 0
    running: int = 0
    accepted: int = 0  # have been kept; those that a batch has used included
    rejected: int = 0  # have been left out
    stale: int = 0  # were accepted, and left out later because they had become too old; not counted in the other two
    claimed: int = 0  # rejected ones that are not replaced, because a dynamic batch counts them


class StalenessManager:
    """Counts episodes and says how many more may begin; every method may be called from any thread.

    Args:
        max_concurrent_rollouts: most episodes that run at once; None is ``consumer_batch_size``.
        consumer_batch_size: episodes of one training batch.
        max_head_offpolicyness: versions that training may be ahead of an episode's beginning; 0 is synchronous training.
        replaces_rejected: begin another episode for each that is rejected; in a dynamic batch they keep their place.

    Raises:
        UsageError: a number is out of range.
    """

    def __init__(
        self,
        *,
        max_concurrent_rollouts: int | None = None,
        consumer_batch_size: int = 1,
        max_head_offpolicyness: float = 0,
        replaces_rejected: bool = True,
    ) -> None:
        if max_head_offpolicyness < 0:
            raise UsageError(
                f"max_head_offpolicyness must be at least 0, got {max_head_offpolicyness}; 0 is synchronous"
            )
        self.batch_size = max(1, consumer_batch_size)
        self.max_concurrent = max(1, self.batch_size if max_concurrent_rollouts is None else max_concurrent_rollouts)
        self.max_head_offpolicyness = int(max_head_offpolicyness)
        self.replaces_rejected = replaces_rejected
        self._stat = RolloutStat()
        self._lock = threading.Lock()

    @property
    def stat(self) -> RolloutStat:
        """A copy of the counters."""
        with self._lock:
            return replace(self._stat)

    @property
    def pending_limit(self) -> int:
        """Most episodes that should wait in the queue."""
        return (self.max_head_offpolicyness + 1) * self.batch_size

    def capacity(self, version: int) -> int:
        """How many episodes more may begin while the weights have this version; may be negative."""
        with self._lock:
            stat = self._stat
            room = self.max_concurrent - stat.running
            used = stat.accepted + stat.claimed + stat.running
            return min(room, (self.max_head_offpolicyness + version + 1) * self.batch_size - used)

    def enqueue(self, episodes: int = 1) -> None:
        """Episodes wait for capacity."""
        self._add(enqueued=episodes)

    def begin(self) -> None:
        """One of those that wait begins."""
        self._add(enqueued=-1, running=1)

    def accept(self) -> None:
        """One that runs has ended, and is kept."""
        self._add(running=-1, accepted=1)

    def reject(self) -> None:
        """One that runs has ended, and is left out."""
        self._add(running=-1, rejected=1, claimed=0 if self.replaces_rejected else 1)

    def withdraw(self) -> None:
        """One that runs was cancelled, and counts for nothing."""
        self._add(running=-1)

    def discard(self, stale: bool = True, claimed: bool = False) -> None:
        """One that was accepted is not used after all, because it is ``stale`` or its workflow is not wanted any more.

        Another may begin in its place, unless a dynamic batch has ``claimed`` it.
        """
        self._add(accepted=-1, stale=int(stale), claimed=int(claimed))

    def unclaim(self) -> None:
        """A rejected one that a dynamic batch would have counted is run again."""
        self._add(claimed=-1)

    def recover(self, version: int, unused: int = 0, claimed: int = 0) -> None:
        """Begin again where ``unused`` accepted episodes and ``claimed`` rejected ones wait for the next batch."""
        with self._lock:
            self._stat = RolloutStat(accepted=version * self.batch_size + unused, claimed=claimed)

    def _add(self, **changes: int) -> None:
        with self._lock:
            for name, change in changes.items():
                value = getattr(self._stat, name) + change
                assert value >= 0, f"{name} would be {value}"
                setattr(self._stat, name, value)


def oldest_version(trajectory: dict[str, Any]) -> int | None:
    """The weight version of a trajectory's oldest sampled token, over all of its rows; None without sampled tokens."""
    sampled = trajectory["versions"][trajectory["versions"] >= 0]
    return int(sampled.min()) if sampled.numel() else None


def too_old(trajectory: dict[str, Any], version: int, bound: int) -> bool:
    """Whether any token is more than ``bound`` versions behind the version that is to be trained."""
    oldest = oldest_version(trajectory)
    return oldest is not None and oldest < version - bound
