"""Experiments (``areno run``): YAML configurations of all algorithms on one policy loss.

- ``run_experiment``: runs an experiment from its command line; ``trainers``: the training steps.
- ``checks``: validates what a configuration names; ``folders``: the directories of a run; ``plan``: its memory.
- ``cluster``: workers on Ray and Slurm; ``submit``: submission to Slurm; ``launch_text``: ``areno launch``.
"""
