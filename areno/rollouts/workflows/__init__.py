"""Workflows define how an episode turns a data row into a trajectory.

- ``base``: the interface, and groups of samples; ``resolve``: finds a workflow by instance, class, name or file.
- ``rlvr``: a workflow with one answer; ``multi_turn``: a workflow with several attempts; ``rewards``: reward functions.
- ``agents``: runs a user's agent, in this process or in separate ``processes``, and makes training rows.
- ``pickling``: sends users' objects to other processes; ``math_reward``: the default reward of the legacy quickstart.
"""
