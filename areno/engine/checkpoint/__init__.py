"""Capture the random state for checkpoints, and export models. :mod:`areno.training.checkpoints` writes the checkpoints.

- ``rng``: the random state of the process, as JSON.
- ``export``: models in Hugging Face format, with merged adapters; ``gguf_export``: GGUF files for llama.cpp.
"""
