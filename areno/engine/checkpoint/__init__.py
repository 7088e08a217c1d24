"""Random state of checkpoints, and export of full checkpoints."""
