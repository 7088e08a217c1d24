"""Plan the memory of a run before models are loaded, and find batch sizes and layouts that fit into memory.

- ``memory_plan``: plans the memory of each phase of a run; ``table``: the plan as text; ``advice``: option changes for a run
  that does not fit.
- ``sizes``: models, row lengths and microbatches of a run; ``trace``: the engine's memory use, traced on fake tensors.
- ``live_bytes``: counts the bytes of live tensors; ``local_shape``: shapes of one tensor-parallel shard of a model.
- ``memory_probe``: free memory, and current and peak memory use of this process.
- ``gpu_memory``: divides a GPU's memory between training and the KV cache.
- ``tuner``: ``--tune-params`` finds batch sizes that fit; ``trial``: functions that ``tuner`` and ``layout_trial`` run on each
  rank.
- ``layout_estimates``: estimated bytes that a rank holds and sends in a layout; ``fit``: ``areno plan --fit``, which compares
  layouts.
- ``layout_trial``: measures training steps in a layout, for ``areno plan --fit --try``.
"""
