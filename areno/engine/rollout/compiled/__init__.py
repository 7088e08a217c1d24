"""The compiled decode step, which is compiled in a separate process, cached on disk, and loaded in milliseconds.

``traced`` is the function to compile, and ``spec`` is its cache key. ``build`` compiles the step (``python -m
areno.engine.rollout.compiled.build``), ``package`` runs it, and ``switch`` decides when to use it.
"""
