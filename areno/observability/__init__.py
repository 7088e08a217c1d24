"""Logs, metrics, traces, the terminal display and health warnings of a run.

Import the submodules individually, so that a command that only logs stays cheap; none imports torch at import time.
"""
