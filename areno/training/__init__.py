"""The training loop of all runs: steps, evaluation, saving models, checkpoints, resume, and clean shutdown."""
