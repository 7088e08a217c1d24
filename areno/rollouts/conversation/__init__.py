"""Records conversations with the exact sampled tokens, and converts them to training rows.

- ``agent_server``: the server for agents; ``recorder``: records the tokens of every turn.
- ``continuation``: continues a conversation from recorded tokens; ``history``: compares message lists.
- ``trajectory_rows``: training rows; ``spans``: the role of each token, and which tokens are trained on.
"""
