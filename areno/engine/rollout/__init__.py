"""Generation with continuous batching: requests go in, tokens with log-probs come out.

- ``loop``: the thread that serves all requests of an engine; ``decode``: one decode step; ``threads``: its CPU threads.
- ``scheduler``: admission, preemption and cache slots; ``sequence``: the samples and requests that it schedules.
- ``kv_cache``: the cache in slots; ``prefix_store``: finished contexts, for requests with the same prefix.
- ``paged``: the loop over a paged cache, for GPUs; ``compiled``: decode steps compiled in a separate process, for CPUs.
- ``sampler``: draws tokens; ``filters`` (top-k, top-p, min-p), ``logit_edits``, ``inverse_cdf`` and ``counter_rng``: its parts.
- ``speculation`` and ``drafts``: speculative decoding by prompt lookup.
- ``routed``: expert choices recorded for routing replay.
- ``pause``: pauses the loop while the weights change; ``load``: its load and counters.
- ``probe``: checks at load time that cached decoding equals a packed forward pass.
"""
