"""The device side: one model for rollout and training, the rollout loop, the training step, checkpoints."""
