"""Training objectives of ``areno train`` and ``areno run``, which turn rows into optimizer steps and statistics.

- ``policy``: scores rows, turns rewards into advantages, and updates the policy and the critic
- ``passes``: divides rows into minibatches
- ``base``: the interface of objectives without generation
- ``sft``: the objective of SFT
- ``pairs``: the objectives of DPO and of reward models
- ``reference``: computes log-probs of a frozen reference, and caches the log-probs on disk
"""
