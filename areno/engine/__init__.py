"""The engine loads the models of a run on their devices, generates, scores, trains, and saves checkpoints.

- ``backend``: the interface to the models of a run; ``engine``: the models on one device; ``engine_config``: its settings.
- ``role``: actor, reference, critic and reward model; ``scoring``: scores rows with any role.
- ``rollout``: generation; ``train``: optimizer steps; ``model``: the model; ``parallel``: parallelism over devices.
- ``plan``: plans and measures the memory of a run; ``checkpoint``: random state and export; ``kernels``: C++ kernels for CPUs.
- ``device``: the device of a thread; ``cpu_threads`` and ``libc_tuning``: threads and memory allocation on CPUs.
- ``limits``: context length and vocabulary; ``heartbeat``: liveness; ``inference``: the rollout loop's logger.
"""
