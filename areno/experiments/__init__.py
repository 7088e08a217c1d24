"""Experiments of ``areno run``, configured by YAML files.

- ``run_experiment``: runs an experiment from its command line; ``trainers``: the training steps.
- ``replay``: runs ``areno replay`` on the rows of an experiment.
- ``checks``: checks files, functions and packages; ``folders``: the directories of a run; ``plan``: plans the memory of a run.
- ``cluster``: workers on Ray and Slurm; ``slurm_job``: submission to Slurm; ``launch_text``: output of ``areno launch``.
"""
