"""Experiments of ``areno run``, configured by YAML files.

- ``run_experiment``: runs an experiment.
- ``trainers``: the trainers, which define the training steps.
- ``replay``: trains on the recorded rows of an experiment, for ``areno replay``.
- ``checks``: checks files, functions and packages.
- ``folders``: the directories of a run.
- ``plan``: plans the memory of a run.
- ``cluster``: workers on Ray and Slurm.
- ``slurm_job``: submission to Slurm.
- ``launch_text``: output of ``areno launch``.
"""
