"""Workflows define how an episode turns a data row into a trajectory.

- ``base``: the interface, and groups of samples; ``resolve``: workflows by instance, class, name or file.
- ``rlvr`` and ``multi_turn``: workflows with one answer and with several attempts; ``rewards``: reward functions.
- ``agents``: runs a user's agent, in this process or in separate ``processes``, and makes training rows.
- ``pickling``: sends users' objects to other processes; ``math_reward``: the default reward of the legacy quickstart.
"""
