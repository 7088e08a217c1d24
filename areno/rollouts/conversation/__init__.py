"""Records conversations with the exact sampled tokens, and converts them to training rows.

- ``agent_server``: the server for agents; ``recorder``: records the tokens of every turn.
- ``continuation``: continues a conversation from recorded tokens; ``history``: compares message lists.
- ``trajectory_rows``: converts turns to training rows; ``spans``: determines token roles, and the tokens to train on.
"""
