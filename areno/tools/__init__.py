"""Tools that convert a run's traces; run a tool with ``python -m areno.tools.NAME``."""
