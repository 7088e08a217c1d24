"""A counter that shows that this process makes progress. Long operations advance the counter."""

from dataclasses import dataclass


@dataclass(slots=True)
class Heartbeat:
    """A progress counter. Use the shared instance :data:`HEARTBEAT`."""

    count: float = 0.0

    def tick(self) -> None:
        """Advance the counter."""
        self.count += 1


HEARTBEAT = Heartbeat()
