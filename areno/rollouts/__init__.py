"""Runs episodes, which return trajectories, and manages the replicas that generate tokens.

- ``staleness``: limits the running episodes of ``areno run``, and decides which trajectories are too old.
- ``dispatcher``: runs episodes in an ``episode_thread``, and forms batches; ``tasks``: the dispatcher's state.
- ``batches_ahead``: batches that ``areno train --rollout async`` generates ahead.
- ``engine_client``: the engine as workflows see it; ``workflows``: the episodes.
- ``conversation``: the recorded turns of an agent, and their training rows.
- ``trajectory``: the result of an episode, and its conversion to training rows; ``dump``: trajectories as text files.
- ``fleet``: rollout engines in separate processes, their supervision, and weight updates.
- ``servers``: inference servers as replicas; ``shared_engine``: rollout on the training engine.
"""
