"""Reward of a repair: see ``Repair.reward`` in ``coding.py``.

Restores the model's final files and runs the tests again in the sandbox.
"""

from __future__ import annotations

from functools import partial

from coding import Repair
from sandbox import working_method

from areno.api.agentic.environment import environment_reward

working_method()  # fails at import if no sandbox works
reward_fn = environment_reward(partial(Repair, replaying=True))
