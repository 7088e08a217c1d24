"""The rollout loop for GPUs: paged KV cache, attention over block tables, CUDA graphs and overlapped decode steps.

- ``loop``: the rollout loop over a paged cache; ``pipeline``: launches a decode step before the tokens of the previous step
  are read.
- ``paged_kv_cache``: the cache; ``page_allocator``: the free pages; ``plans``: attention plans over the cache.
- ``graphs``: one decode step on the device; ``capture``: captures a step in CUDA graphs.
- ``kernel``: decode attention in Triton; ``backends``: chooses this kernel, or gathers pages if the kernel does not work.
"""
