"""Backends, which run the models of a :class:`areno.Trainer`."""
