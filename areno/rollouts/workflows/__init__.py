"""What an episode does: from a data row to a trajectory.

- ``base``: the interface, groups of samples; ``resolve``: workflows by instance, class, name or file.
- ``rlvr`` and ``multi_turn``: one answer, or several tries, with a reward function (``rewards``).
- ``agents``: a user's agent through a server, in this process or in ``processes`` of its own, and its training rows.
"""
