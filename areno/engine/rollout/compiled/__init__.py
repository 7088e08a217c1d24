"""The compiled decode step. A separate process compiles the step and caches it on disk. Loading takes milliseconds.

``traced`` is the function to compile, and ``spec`` is its cache key. ``build`` compiles the step (``python -m
areno.engine.rollout.compiled.build``), ``package`` runs it, and ``switch`` decides when to use it.
"""
