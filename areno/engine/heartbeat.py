"""Whether this process gets on with its work: a count that everything which takes long moves on."""

from dataclasses import dataclass


@dataclass(slots=True)
class Heartbeat:
    """A counter; :data:`HEARTBEAT` is the process's."""

    count: float = 0.0

    def tick(self) -> None:
        """Something was done."""
        self.count += 1


HEARTBEAT = Heartbeat()
