"""Rollout replicas in separate processes, and the transfer of new weights to them.

- ``fleet``: the replicas, with the generation interface of one engine; ``control``: ``areno scale``.
- ``replica_supervisor``: starts, restarts and resizes replicas; ``router``: sends requests to them.
- ``weight_transfer``: new weights from the trainer to replicas; ``weight_update``: its steps on each rank.
- ``server_weight_transfer``: new weights to inference servers; ``tensors``: weights as named full tensors.
"""
