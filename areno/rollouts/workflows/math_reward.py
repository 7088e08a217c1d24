"""The default reward of ``main_async_ppo.py`` and ``main_sync_ppo.py``: 1 for a mathematically correct answer."""

from typing import Any

from areno.rewards.math import math_verify_reward


def math_reward(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """Return 1.0 if the completion's answer is correct, otherwise 0.0.

    The reference answer is the row's field ``solutions``, or ``answer`` if the row has no ``solutions``.
    """
    return math_verify_reward(completions, data.get("solutions", data.get("answer")))
