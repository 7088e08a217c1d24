"""Rollout processes beside a trainer, and how new weights come into them."""
