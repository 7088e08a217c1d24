"""Generate tokens with continuous batching. Requests are answered with tokens and log-probs.

- ``loop``: the thread that serves all requests of an engine; ``decode``: one decode step; ``threads``: the number of CPU
  threads for a forward pass.
- ``scheduler``: admission, preemption and cache slots; ``sequence``: the scheduled samples and requests.
- ``slot_cache``: a KV cache with one slot per sequence; ``prefix_store``: keys and values of finished samples, for requests
  with the same prefix.
- ``paged``: the rollout loop with a paged KV cache, for GPUs; ``compiled``: decode steps compiled in a separate process, for
  CPUs.
- ``sampler``: samples tokens; ``filters`` (top-k, top-p, min-p), ``logit_edits``, ``inverse_cdf`` and ``counter_rng``: parts of
  sampling.
- ``speculation`` and ``drafts``: speculative decoding by prompt lookup.
- ``routed``: reads the recorded expert choices, for routing replay.
- ``pause``: pauses the loop while the weights change; ``load``: the loop's current load, and counts of its tokens and steps.
- ``probe``: checks, when a model is loaded, that decoding with a KV cache gives the same results as one forward pass.
"""
