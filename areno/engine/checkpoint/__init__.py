"""Checkpoints: Hugging Face files with the trainer's state beside them, written so that a kill leaves no half of one."""
