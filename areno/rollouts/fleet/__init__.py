"""Rollout replicas in separate processes, and the transfer of new weights to them.

- ``fleet``: the replicas, with the generation interface of one engine; ``control``: handles ``areno scale``.
- ``replica_supervisor``: starts, restarts and resizes replicas; ``router``: sends requests to them.
- ``weight_transfer``: sends new weights from the trainer to replicas; ``weight_update``: the steps on each rank.
- ``server_weight_transfer``: sends new weights to inference servers; ``tensors``: weights as named full tensors.
"""
