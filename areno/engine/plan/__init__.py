"""Plans a run's memory from shapes before models are loaded, and finds sizes and layouts that fit.

- ``memory_plan``: plans a run by phase and purpose; ``table``: the plan as text; ``advice``: option changes for a run that
  does not fit.
- ``sizes``: models, row lengths and microbatches of a run; ``trace``: measures the engine on fake tensors.
- ``live_bytes``: counts the bytes of live tensors; ``local_shape``: gives the shapes of a tensor-parallel shard.
- ``memory_probe``: free memory, and current and peak memory use of this process.
- ``gpu_memory``: divides a GPU's memory between training and the KV cache.
- ``tuner``: ``--tune-params`` finds batch sizes that fit; ``trial``: functions that ``tuner`` and ``layout_trial`` run on each
  rank.
- ``layout_estimates``: bytes held and sent in each layout; ``fit``: ``areno plan --fit``, which compares layouts.
- ``layout_trial``: measures layouts, for ``areno plan --fit --try``.
"""
