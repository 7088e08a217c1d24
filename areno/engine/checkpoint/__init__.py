"""The random state saved in checkpoints, and the export of models. :mod:`areno.training.checkpoints` writes the checkpoints.

- ``rng``: random state of the process, as JSON.
- ``export``: full checkpoints with merged adapters; ``gguf_export``: GGUF files for llama.cpp.
"""
