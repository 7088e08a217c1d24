"""The memory of a run: planned from shapes before anything is loaded, measured while it runs, and tuned.

- ``memory_plan``: plans a run by phase and purpose; ``table``: the plan as text; ``advice``: what to change if it does not fit.
- ``sizes``: what a plan needs to know about a run; ``trace``: measures the engine on fake tensors.
- ``live_bytes`` and ``local_shape``: count the bytes of live tensors, and give the shapes of a tensor-parallel shard.
- ``memory_probe``: memory of this process that is free, in use, or was used at the peak.
- ``gpu_memory``: divides a GPU's memory between training and the KV cache.
- ``tuner``: ``--tune-params`` finds batch sizes that fit; ``trial``: what each rank runs for it and for ``layout_trial``.
- ``layouts``: bytes held and sent in each layout; ``fit``: ``areno plan --fit``, which compares layouts.
- ``layout_trial``: measures layouts, for ``areno plan --fit --try``.
"""
