"""Whether this process gets on with its work: a count that everything which takes long moves on."""

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """A counter; :data:`PROGRESS` is the process's."""

    count: float = 0.0

    def tick(self) -> None:
        """Something was done."""
        self.count += 1


PROGRESS = Progress()
