"""What a run is, whichever front end it was written in; each front end makes one of these, and the one loop reads it."""

from areno.spec.run import CheckpointSpec, Frequency, RunSpec, Span

__all__ = ["CheckpointSpec", "Frequency", "RunSpec", "Span"]
