"""The embedded runs: a tiny model that learns to add, with no network and no account, and a pretrained one."""

REAL_STEPS = 40
"""Steps of ``areno quickstart --real``, unless given."""
