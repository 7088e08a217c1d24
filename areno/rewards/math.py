"""Reward 1 for a mathematically right answer, 0 for a wrong one, decided by ``math-verify``.

Equality is symbolic: 1/2, 0.5 and \\frac{1}{2} are the same. The last ``\\boxed{...}`` counts; without one, math-verify
looks for the answer in the text. An answer that takes more than a few seconds to compare, such as a tower of powers, is
wrong: what a model writes must not be able to stop a run.
"""

from __future__ import annotations

import threading
from typing import Any

from areno.errors import RewardError

try:
    from math_verify import parse, verify
except ImportError as error:
    raise RewardError('the math reward needs math-verify; install it with: pip install "areno[math]"') from error

CHECK_TIMEOUT_S = 3  # for reading and for comparing an answer, each


def math_verify_reward(completion: str, answer: Any) -> float:
    """Compare a completion with the reference answer.

    Args:
        completion: what the model wrote.
        answer: the reference, as text or number, or a list whose first entry is it.

    Returns:
        1.0 or 0.0.

    Raises:
        RewardError: there is no reference answer, or it cannot be read, so that no completion could ever be right.
    """
    reference = (answer[0] if answer else None) if isinstance(answer, (list, tuple)) else answer
    if reference is None or not str(reference).strip():
        raise RewardError(
            f"the row has no reference answer (got {answer!r}); set `solutions` or `answer` in the loader"
        )
    text = str(reference)
    # The library's own limit is a signal, which only the main thread can have; elsewhere the runner's deadline holds.
    limit = CHECK_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    gold = parse(text if "\\boxed" in text else f"\\boxed{{{text}}}", parsing_timeout=limit)
    if not gold:
        raise RewardError(f"math-verify cannot read the reference answer {text!r}; leave such rows out in the loader")
    found = parse(completion[max(completion.rfind("\\boxed"), 0) :], parsing_timeout=limit)
    return float(verify(gold, found, timeout_seconds=limit))
