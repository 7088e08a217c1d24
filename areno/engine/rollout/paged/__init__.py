"""GPU rollout: paged KV cache, attention over block tables, CUDA graphs, overlapped decode steps."""
