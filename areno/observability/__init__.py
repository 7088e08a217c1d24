"""What a run shows and leaves behind: logs, TensorBoard events, terminal display, health warnings.

The submodules are imported one by one, so that a command that only logs pays for nothing else; none of them imports
torch when it is itself imported.
"""
