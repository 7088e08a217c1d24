"""Compile decode steps. A separate process compiles a model's decode step and caches the compiled step on disk.

Loading a compiled step takes milliseconds.

- ``traced``: the function to compile; ``spec``: cache key of a compiled step.
- ``build``: compiles a step (``python -m areno.engine.rollout.compiled.build``); ``package``: runs a compiled step.
- ``switch``: decides when decoding uses a compiled step.
"""
