"""Backends: what runs a :class:`areno.Trainer`'s model."""
