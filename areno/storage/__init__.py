"""On-disk state of a run: its directory and lock, checkpoints, and the path tables of both front ends. No torch."""
