"""The compiled decode step: traced and compiled in a separate process, cached on disk, loaded in milliseconds.

``traced`` is the function to compile, ``spec`` its identity; ``build`` compiles it (``python -m
areno.engine.rollout.compiled.build``), ``package`` runs it, and ``switch`` decides when to use it.
"""
