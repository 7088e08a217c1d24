"""Experiments: YAML files, asynchronous RL on one machine, the family of algorithms on one loss.

- ``run``: from a command line to the end; ``trainers``: what a step does.
- ``staleness``: how many episodes may run; ``dispatcher``: runs them, and puts batches together; ``pool``: the event loop
  that they run in.
- ``engine_client``: what a workflow asks for tokens; ``workflows``: what an episode does.
- ``trajectory``: what an episode gives, and its way into training rows; ``dump``: the same as text, for people.
- ``fleet``: rollout engines in processes of their own, and the way of new weights to them; ``scheduler``: starts and watches
  processes; ``name_resolve``: how they find each other.
- ``frequency``, ``saving``, ``recovery``, ``folders``: what is kept, when and where.
"""
