"""The runs of ``areno quickstart``.

By default, a tiny model learns addition, and no network access is needed. With ``--real``, a pretrained model is trained.
"""

REAL_STEPS = 40
"""Default training steps of ``areno quickstart --real``."""
