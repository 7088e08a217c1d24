"""Limits how many episodes ``areno run`` starts, and thereby the staleness of the tokens in a batch.

``areno train`` uses :mod:`areno.rollouts.batches_ahead` instead. An episode generates one prompt group. The capacity is the
number of further episodes that may start (:class:`RolloutStat` explains the counts):

    capacity = min( max(1, max_concurrent) - running,
                    (max_head_offpolicyness + version + 1) * max(1, consumer_batch_size)
                    - (accepted + claimed + running) )

If an episode is rejected or becomes stale, another episode usually replaces it. But if a dynamic batch (see
:class:`StalenessManager`) counts the rejected or stale episode towards the batch size, this episode counts as ``claimed``, and
is not replaced.

The formula limits the staleness. Let eta be ``max_head_offpolicyness``, and let B be ``max(1, consumer_batch_size)``, which is
the number of episodes in a batch. Each batch increases the weight version by 1. An episode can start at version ``v`` only if
the capacity is positive. In this case, fewer than ``(eta + v + 1) * B`` earlier episodes are running, accepted or claimed. All
other earlier episodes, for example cancelled or replaced episodes, do not count towards the size of a batch. If batches
always used episodes in the order in which the episodes started, at most ``eta + v`` batches would come before the batch with
the new episode. The new episode would therefore be used at version ``eta + v`` or earlier.

But a batch does not wait for a long episode. Shorter episodes overtake the long episode, which is then used later. If the
dispatcher has a ``max_staleness``, the dispatcher therefore checks each trajectory with :func:`too_old`.
"""

import threading
from dataclasses import dataclass, replace
from typing import Any

from areno.errors import UsageError


@dataclass(slots=True)
class RolloutStat:
    """The current numbers of waiting and running episodes, and totals of finished episodes."""

    enqueued: int = 0
    running: int = 0
    accepted: int = 0  # including those already used in batches
    rejected: int = 0
    stale: int = 0  # accepted, but later discarded as too old; not included in ``accepted`` or ``rejected``
    claimed: int = 0  # rejected or stale episodes that are not replaced, because a dynamic batch counts them


class StalenessManager:
    """Counts episodes, and computes how many more episodes may start. Thread-safe.

    Args:
        max_concurrent_rollouts: maximum number of running episodes; None: ``consumer_batch_size``.
        consumer_batch_size: episodes per training batch.
        max_head_offpolicyness: maximum number of batches that generation may be ahead of training; 0: synchronous training.
        replaces_rejected: whether another episode may start in place of a rejected episode; False for dynamic batches. A
            dynamic batch counts rejected episodes towards its size, and therefore may have fewer than
            ``consumer_batch_size`` trajectories.

    Raises:
        UsageError: ``max_head_offpolicyness`` is negative.
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
                f"max_head_offpolicyness must be at least 0 (0 means synchronous training), got {max_head_offpolicyness}"
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
        """Maximum number of episodes that may wait in the queue."""
        return (self.max_head_offpolicyness + 1) * self.batch_size

    def capacity(self, version: int) -> int:
        """Return the number of further episodes that may start at this weight version. The number may be negative."""
        with self._lock:
            stat = self._stat
            room = self.max_concurrent - stat.running
            used = stat.accepted + stat.claimed + stat.running
            return min(room, (self.max_head_offpolicyness + version + 1) * self.batch_size - used)

    def enqueue(self, episodes: int = 1) -> None:
        """Count further episodes as waiting for capacity."""
        self._add(enqueued=episodes)

    def begin(self) -> None:
        """Count an episode as running, and no longer as waiting."""
        self._add(enqueued=-1, running=1)

    def accept(self) -> None:
        """Count an episode as accepted, and no longer as running."""
        self._add(running=-1, accepted=1)

    def reject(self) -> None:
        """Count an episode as rejected, and no longer as running."""
        self._add(running=-1, rejected=1, claimed=0 if self.replaces_rejected else 1)

    def withdraw(self) -> None:
        """Stop counting an episode as running, because it was cancelled."""
        self._add(running=-1)

    def discard(self, stale: bool = True, claimed: bool = False) -> None:
        """Stop counting an episode as accepted, because training will not use it.

        Args:
            stale: count the episode as stale.
            claimed: count the episode as claimed (see :class:`RolloutStat`), so that no other episode may start in its place.
        """
        self._add(accepted=-1, stale=int(stale), claimed=int(claimed))

    def unclaim(self) -> None:
        """Stop counting an episode as claimed (see :class:`RolloutStat`), so that another episode may start in its place."""
        self._add(claimed=-1)

    def recover(self, version: int, unused: int = 0, claimed: int = 0) -> None:
        """Restore the counts of a resumed run.

        Args:
            version: current weight version.
            unused: number of accepted episodes that no batch has used.
            claimed: number of claimed episodes (see :class:`RolloutStat`) that no batch has counted towards its size yet.
        """
        with self._lock:
            self._stat = RolloutStat(accepted=version * self.batch_size + unused, claimed=claimed)

    def _add(self, **changes: int) -> None:
        with self._lock:
            for name, change in changes.items():
                value = getattr(self._stat, name) + change
                assert value >= 0, f"{name} would be {value}"
                setattr(self._stat, name, value)


def oldest_version(trajectory: dict[str, Any]) -> int | None:
    """Return the oldest weight version of a trajectory's sampled tokens. None if the trajectory has no sampled tokens."""
    sampled = trajectory["versions"][trajectory["versions"] >= 0]
    return int(sampled.min()) if sampled.numel() else None


def too_old(trajectory: dict[str, Any], version: int, bound: int) -> bool:
    """Whether any sampled token is more than ``bound`` versions older than ``version``."""
    oldest = oldest_version(trajectory)
    return oldest is not None and oldest < version - bound
