"""What a repair is worth: 1.0 all tests pass, 0.5 some more do, -0.5 no gain, -1.0 something broken or nothing written.

The files are brought to where the model left them, and the tests run once more, in the sandbox.
"""

from __future__ import annotations

from functools import partial

from coding import Repair
from sandbox import working_method

from areno.api.agentic.environment import environment_reward

working_method()  # refuses at once where nothing can hold the tests
reward_fn = environment_reward(partial(Repair, replaying=True))
