"""Trainers of experiments: ``experiment`` is their base class, ``rl`` and ``supervised`` define the steps.

``row_source`` reads the data, ``engines`` turns configuration sections into engines, ``update`` is one policy update.
"""

from areno.experiments.trainers.rl import PPOTrainer
from areno.experiments.trainers.supervised import DPOTrainer, RWTrainer, SFTTrainer

__all__ = ["DPOTrainer", "PPOTrainer", "RWTrainer", "SFTTrainer"]
