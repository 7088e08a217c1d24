"""The local backend: areno's own engine."""
