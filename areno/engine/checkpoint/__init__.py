"""Random state of checkpoints, and export of models; :mod:`areno.training.checkpoints` writes the checkpoints themselves.

- ``rng``: random state of the process, as JSON.
- ``export``: full checkpoints with adapters merged; ``gguf_export``: GGUF files for llama.cpp.
"""
