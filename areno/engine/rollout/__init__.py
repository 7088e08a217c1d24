"""Generation with continuous batching: takes requests, and returns tokens with log-probs.

- ``loop``: the thread that serves all requests of an engine; ``decode``: one decode step; ``threads``: the CPU threads of a
  decode step.
- ``scheduler``: admission, preemption and cache slots; ``sequence``: the scheduled samples and requests.
- ``slot_cache``: the KV cache in slots; ``prefix_store``: the KV caches of finished samples, for requests with the same
  prefix.
- ``paged``: the loop over a paged cache, for GPUs; ``compiled``: decode steps compiled in a separate process, for CPUs.
- ``sampler``: draws tokens; ``filters`` (top-k, top-p, min-p), ``logit_edits``, ``inverse_cdf`` and ``counter_rng`` are parts
  of sampling.
- ``speculation`` and ``drafts``: speculative decoding by prompt lookup.
- ``routed``: reads the expert choices recorded for routing replay.
- ``pause``: pauses the loop while the weights change; ``load``: the loop's load and counters.
- ``probe``: checks at load time that cached decoding equals a packed forward pass.
"""
