"""Tools that convert a run's traces; run one with ``python -m areno.tools.NAME``."""
