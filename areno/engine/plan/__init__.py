"""Plans the memory of a run from shapes before anything is loaded, measures it, and tunes sizes to fit.

- ``memory_plan``: plans a run by phase and purpose; ``table``: the plan as text; ``advice``: what to change if it does not fit.
- ``sizes``: the sizes of a run that a plan needs; ``trace``: measures the engine on fake tensors.
- ``live_bytes`` and ``local_shape``: count the bytes of live tensors, and give the shapes of a tensor-parallel shard.
- ``memory_probe``: free memory, and current and peak use of this process.
- ``gpu_memory``: divides a GPU's memory between training and the KV cache.
- ``tuner``: ``--tune-params`` finds batch sizes that fit; ``trial``: what each rank runs for ``tuner`` and ``layout_trial``.
- ``layout_estimates``: bytes held and sent in each layout; ``fit``: ``areno plan --fit``, which compares layouts.
- ``layout_trial``: measures layouts, for ``areno plan --fit --try``.
"""
