"""The random state of a checkpoint, and full checkpoints from adapters."""
