"""The trainers of ``areno run``. ``rl`` and ``supervised`` define the steps. ``experiment`` has the base class.

A step of reinforcement learning is ``PPOTrainer.run_step`` in ``rl``:

1. rollout: :class:`areno.rollouts.dispatcher.BatchDispatcher` returns a batch of episodes; ``workflows`` creates the workflow
2. reward: the workflow has set the rewards, or a reward model sets them
3. advantage and update: :mod:`areno.training.objectives.policy`, with settings and loss from ``update``
4. new weights: ``update_weights`` of :class:`areno.rollouts.fleet.fleet.RolloutFleet` sends the weights to the replicas

- ``row_source``: reads the data; ``engines``: creates engines from configuration sections.
- ``experiment_reporter``: reports steps.
"""

from areno.experiments.trainers.rl import PPOTrainer
from areno.experiments.trainers.supervised import DPOTrainer, RWTrainer, SFTTrainer

__all__ = ["DPOTrainer", "PPOTrainer", "RWTrainer", "SFTTrainer"]
