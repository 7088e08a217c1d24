"""Continuous-batching generation: scheduler, KV cache, sampler, and the loop that ties them together."""
