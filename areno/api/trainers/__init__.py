"""Training loops: one per kind of algorithm, on a shared skeleton."""
