"""Trainers of experiments: ``base`` is the frame, ``rl`` and ``supervised`` are what happens in a step.

``rows`` reads the data, ``engines`` turns sections into engines, ``update`` is one policy update.
"""

from areno.experiments.trainers.rl import PPOTrainer
from areno.experiments.trainers.supervised import DPOTrainer, RWTrainer, SFTTrainer

__all__ = ["DPOTrainer", "PPOTrainer", "RWTrainer", "SFTTrainer"]
