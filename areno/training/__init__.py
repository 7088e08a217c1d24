"""The training loop that all runs share: steps, evaluation, models, checkpoints, resume, and a clean end."""
