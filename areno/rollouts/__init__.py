"""Rollouts beside training: episodes of prompts, run by processes of their own, and the trajectories that they give.

- ``staleness``: how many episodes may run; ``dispatcher``: runs them and forms batches; ``pool``: the event loop that they
  run in.
- ``engine_client``: what a workflow asks for tokens; ``workflows``: what an episode does; ``conversation``: its tokens.
- ``trajectory``: what an episode gives, and its way into training rows; ``dump``: the same as text, for people.
- ``fleet``: rollout engines in processes of their own, started, watched and restarted, and how new weights reach them.
"""
