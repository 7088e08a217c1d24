"""The runs of ``areno quickstart``: a tiny model that learns to add, without network access, and a pretrained model."""

REAL_STEPS = 40
"""Default training steps of ``areno quickstart --real``."""
