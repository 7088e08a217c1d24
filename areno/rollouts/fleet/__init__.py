"""Runs rollout replicas in separate processes, and transfers new weights to the replicas.

- ``fleet``: gives the replicas the generation interface of one engine; ``control``: handles ``areno scale``.
- ``replica_supervisor``: starts, restarts and stops replicas; ``router``: sends requests to replicas.
- ``weight_transfer``: sends new weights from the trainer to replicas; ``weight_update``: the steps of an update on each rank.
- ``server_weight_transfer``: sends new weights to inference servers; ``tensors``: weights as named full tensors.
"""
