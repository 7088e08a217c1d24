"""Training objectives of both front ends: they turn rows into optimizer steps and statistics.

- ``policy``: scores rows, turns rewards into advantages, and updates the policy and the critic
- ``passes``: minibatches
- ``base``: the interface of objectives without generation
- ``sft``: SFT
- ``pairs``: DPO and reward models
- ``reference``: log-probs of a frozen reference, cached on disk
"""
