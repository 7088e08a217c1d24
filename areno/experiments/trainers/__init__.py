"""The trainers of ``areno run``. ``rl`` and ``supervised`` define the steps. ``experiment`` has the base class.

A step of reinforcement learning is ``PPOTrainer.run_step`` in ``rl``:

1. rollout: :class:`areno.rollouts.dispatcher.BatchDispatcher` runs the workflow that ``workflows`` has created, and returns a
   batch of episodes
2. reward: either the workflow sets the rewards during the rollout, or a reward model sets them afterwards
3. advantage and update: :mod:`areno.training.objectives.policy`, with settings and loss from ``update``
4. new weights: ``update_weights`` of :class:`areno.rollouts.fleet.fleet.RolloutFleet` sends the weights to the replicas

- ``row_source``: reads the data; ``engines``: creates engines from configuration sections.
- ``experiment_reporter``: reports steps.
"""

from areno.experiments.trainers.rl import PPOTrainer
from areno.experiments.trainers.supervised import DPOTrainer, RWTrainer, SFTTrainer

__all__ = ["DPOTrainer", "PPOTrainer", "RWTrainer", "SFTTrainer"]
