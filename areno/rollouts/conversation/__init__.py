"""The tokens of a conversation, as they were sampled, and the training rows that they become.

- ``server``: what agents talk to; ``tape``: the tokens of every turn, which it records.
- ``continuation``: how a conversation continues from known tokens, and when it cannot; ``history``: when two message
  lists are the same.
- ``rows``: training rows, with ``spans`` of roles, and the policy of which tokens are trained on.
"""
