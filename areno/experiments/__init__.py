"""Experiments from YAML: workflows, asynchronous RL, rollout processes beside the trainer."""
