"""The rollout loop for GPUs: paged KV cache, attention over block tables, CUDA graphs, overlapped decode steps.

- ``loop``: the rollout loop over a paged cache; ``pipeline``: launches a decode step before the tokens of the previous one are
  read.
- ``paged_kv_cache``: the cache; ``page_allocator``: which pages are free; ``plans``: attention plans over it.
- ``graphs``: one decode step on the device; ``capture``: captures it in CUDA graphs.
- ``kernel``: decode attention in Triton; ``backends``: that kernel, or a gather if the kernel does not work.
"""
