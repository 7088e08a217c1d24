"""Reward of an answer that should be a JSON object, in named parts: format, keys, types and values.

The parts increase with each right key, type and value, so that partly right answers to a prompt get different rewards.
"""

from __future__ import annotations

import json
from typing import Any

from areno.types import RewardRecord

PARTS = ("exact", "json", "keys", "types", "values")


def reward_fn(record: RewardRecord) -> dict[str, float]:
    """Return the parts of the reward of ``record.completion``, compared with the row's ``solutions``; ``--reward-weights``
    weights them.

    Raises:
        KeyError: the row has no reference answer.
    """
    if not record.answer:
        raise KeyError("the row has no `solutions`; make the data with examples/structured/make_data.py")
    return reward_parts(record.completion, record.answer[0])


def reward_parts(completion: str, solution: str) -> dict[str, float]:
    """Return the parts of a reward, each from 0 to 1, by their names in ``PARTS``.

    * ``exact``: 1 for an object that equals the solution, without other text; 0 otherwise;
    * ``json``: 1 for an object without other text, 0.5 for an object with text around it, 0 without an object;
    * ``keys``: number of keys in both answer and solution, divided by the number of keys in at least one of them;
    * ``types``, ``values``: fraction of the solution's keys whose value has the right type, or is right.
    """
    expected: dict[str, Any] = json.loads(solution)
    answer, whole = find_object(completion)
    if answer is None:
        return dict.fromkeys(PARTS, 0.0)
    common = expected.keys() & answer.keys()
    types = {key for key in common if type(answer[key]) is type(expected[key])}
    parts = {
        "json": 1.0 if whole else 0.5,
        "keys": len(common) / len(expected.keys() | answer.keys()),
        "types": len(types) / len(expected),
        "values": sum(answer[key] == expected[key] for key in types) / len(expected),
    }
    return {"exact": float(all(part == 1.0 for part in parts.values())), **parts}


def find_object(text: str) -> tuple[dict[str, Any] | None, bool]:
    """Return the JSON object at the first brace of a text, or None, and whether only whitespace surrounds the object."""
    begin = text.find("{")
    if begin < 0:
        return None, False
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None, False
    return value, not (text[:begin] + text[end:]).strip()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
