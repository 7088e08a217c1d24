"""One ``transformers`` module for rollout and training; only the attention plan of a call differs."""
