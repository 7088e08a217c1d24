"""Training objectives of both front ends: from rows to optimizer steps and their statistics.

- ``policy``: scores rows, turns rewards into advantages, and updates policy and critic; ``passes``: their minibatches.
- ``base``: the interface of objectives without generation; ``sft`` and ``pairs``: SFT, and DPO and reward models.
- ``reference``: log-probs of a frozen reference, cached on disk.
"""
