"""Starts worker processes on this machine, on a Ray cluster, or on the nodes of a Slurm job.

- ``launcher``: the interfaces; ``local``, ``ray_cluster`` and ``slurm_steps``: implementations of the interfaces.
- ``links``: connections to workers on other machines, with signed messages; ``placement``: assigns workers to nodes.

:mod:`areno.experiments.slurm_job` submits jobs to Slurm. :mod:`areno.engine.parallel.workers` supervises groups of processes.
"""
