"""Starts the worker processes of an experiment on this machine, on a Ray cluster, or on the nodes of a Slurm job.

- ``launcher``: the interfaces; ``local``, ``ray_cluster`` and ``slurm``: their implementations.
- ``links``: signed connections of workers on other machines; ``placement``: which worker goes to which node.

:mod:`areno.experiments.submit` submits jobs to Slurm; :mod:`areno.engine.parallel.workers` supervises groups of processes.
"""
