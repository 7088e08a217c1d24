"""Workflows: how an episode turns a data row into a trajectory.

- ``base``: the interface, and groups of samples; ``resolve``: workflows by instance, class, name or file.
- ``rlvr`` and ``multi_turn``: one answer, or several attempts, with a reward function (``rewards``).
- ``agents``: a user's agent that talks to a server, in this process or in separate ``processes``, and its training rows.
- ``pickling``: users' objects for other processes; ``math_reward``: the default reward of the legacy quickstart.
"""
