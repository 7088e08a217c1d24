"""The decode step as compiled code: traced and built in a process of its own, kept on disk, loaded in milliseconds.

``traced`` is what is compiled, ``spec`` names it, ``build`` makes it (``python -m areno.engine.rollout.compiled.build``),
``package`` runs it, and ``switch`` decides when.
"""
