"""Runs an engine on several devices.

Processes:

- ``group``: an engine on several ranks, with the interface of :class:`Engine`; ``server``: the engine of one rank.
- ``workers``: starts, calls and ends worker processes; ``worker``: the program of a worker process.
- ``messages``: messages between worker processes and the process that started them.
- ``rendezvous``: how ranks find each other; ``lockstep``: rollout loops of ranks that hold shards of one model.

Division of the work:

- ``layout``: the grid of ranks; ``rank_context``: a rank's place in the grid, and its communication groups.
- ``balance``: divides rows into parts of similar size; ``channels``: collectives; ``segment``: shared memory for collectives on
  one machine.
- ``sharding``: tensor parallelism; ``context``: context parallelism; ``experts``: expert parallelism.
- ``fsdp``: fully sharded weights; ``parts``: converts between shards and unsharded tensors.
- ``pipeline``: pipeline parallelism; ``schedule``: the order of each stage's passes.
"""
