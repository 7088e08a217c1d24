"""Load the models of a run on devices, generate text, score token rows, train, and save checkpoints.

- ``backend``: the interface to the models of a run; ``engine``: the models on one device; ``engine_config``: engine settings.
- ``role``: actor, reference, critic and reward model; ``scoring``: log-probs, values and rewards of token rows.
- ``rollout``: generation; ``train``: optimizer steps; ``model``: model code; ``parallel``: parallelism over devices.
- ``plan``: plans and measures the memory of a run; ``checkpoint``: random state of checkpoints, and export of models.
- ``device``: device selection, and copies between host and device; ``kernels``: C++ kernels for CPUs.
- ``cpu_threads`` and ``libc_tuning``: threads and memory allocation on CPUs.
- ``limits``: context length and vocabulary; ``heartbeat``: a progress counter; ``inference``: progress logs of generation.
"""
