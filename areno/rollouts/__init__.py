"""Runs episodes, which return trajectories, and manages the replicas that generate tokens.

- ``staleness``: limits the number of running episodes in ``areno run``, and finds trajectories that are too old.
- ``dispatcher``: runs episodes, and forms batches; ``tasks``: its state; ``episode_thread``: the event loop of the episodes.
- ``batches_ahead``: batches that ``areno train --rollout async`` generates ahead.
- ``engine_client``: sends the requests of workflows to an engine; ``workflows``: define the episodes.
- ``conversation``: records the turns of agents, and converts them to training rows.
- ``trajectory``: the result of an episode, and its conversion to training rows; ``dump``: trajectories as text files.
- ``fleet``: starts rollout engines in separate processes, supervises these processes, and updates the weights.
- ``servers``: replicas that are inference servers; ``shared_engine``: generates with the training engine.
"""
