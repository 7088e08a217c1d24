"""Liveness counter of this process. Long-running operations advance the counter."""

from dataclasses import dataclass


@dataclass(slots=True)
class Heartbeat:
    """A progress counter. Use the process-wide instance :data:`HEARTBEAT`."""

    count: float = 0.0

    def tick(self) -> None:
        """Record progress."""
        self.count += 1


HEARTBEAT = Heartbeat()
