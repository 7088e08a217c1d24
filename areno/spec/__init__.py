"""The run specification, which every front end produces and the training loop reads."""

from areno.spec.run_spec import CheckpointSpec, Frequency, RunSpec, Span

__all__ = ["CheckpointSpec", "Frequency", "RunSpec", "Span"]
