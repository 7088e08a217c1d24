"""Starts the worker processes of an experiment on this machine, on a Ray cluster, or on the nodes of a Slurm job."""
