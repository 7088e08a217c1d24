"""Compile decode steps. A separate process compiles a step and caches it on disk. Loading a compiled step takes milliseconds.

``traced`` is the function to compile, and ``spec`` is the cache key of a compiled step. ``build`` compiles the step (``python
-m areno.engine.rollout.compiled.build``), ``package`` runs the compiled step, and ``switch`` decides when to use the compiled
step.
"""
