"""The rollout loop for GPUs, with a paged KV cache, CUDA graphs, and decode steps that overlap with work on the host.

- ``loop``: the rollout loop with a paged cache; ``pipeline``: launches a decode step before the tokens of the previous step are
  read.
- ``paged_kv_cache``: the paged cache; ``page_allocator``: allocates pages; ``plans``: how attention reads and writes the cache.
- ``graphs``: one decode step on the device; ``capture``: captures decode steps as CUDA graphs.
- ``kernel``: decode attention in Triton; ``backends``: chooses the Triton kernel, or PyTorch's attention if the kernel does not
  work.
"""
