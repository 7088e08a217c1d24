"""Liveness counter of this process: every long-running operation advances it."""

from dataclasses import dataclass


@dataclass(slots=True)
class Heartbeat:
    """A progress counter; use the process-wide :data:`HEARTBEAT`."""

    count: float = 0.0

    def tick(self) -> None:
        """Record progress."""
        self.count += 1


HEARTBEAT = Heartbeat()
