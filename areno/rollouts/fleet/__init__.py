"""Rollout replicas in separate processes, and the transfer of new weights to them."""
