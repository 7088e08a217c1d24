"""What a run keeps on disk: its directory and lock, checkpoints, and the table of paths of each front end. No torch."""
