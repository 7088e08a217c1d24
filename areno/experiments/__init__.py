"""Experiments: asynchronous RL on one machine, from the rows of a data set to batches of trajectories.

- ``staleness``: how many episodes may run; ``dispatcher``: runs them, and puts batches together; ``pool``: the event loop
  that they run in.
- ``engine_client``: what a workflow asks for tokens; ``workflows``: what an episode does.
- ``trajectory``: what an episode gives, and its way into training rows; ``dump``: the same as text, for people.
"""
