"""What a GPU needs for rollout: a KV cache in pages, attention over block tables, captured and overlapped decode steps."""
