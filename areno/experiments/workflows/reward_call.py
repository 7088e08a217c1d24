"""The inside of a reward worker: calls ``reward_fn(prompt, completions, prompt_ids, completion_ids, **data)``.

Reward workers import this file by its path, so it stands alone and loads neither torch nor the rest of the package.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import cloudpickle

from areno.config.hooks import named_object
from areno.types import RewardRecord

_known: dict[bytes | str, Callable[..., Any]] = {}


def call_reward(record: RewardRecord) -> Any:
    """Call the function that a record carries: as a name, or pickled. A coroutine function is run to its end."""
    wanted = record.metadata["reward_fn"]
    if wanted not in _known:
        named = isinstance(wanted, str)
        _known[wanted] = named_object(wanted, option="reward_fn") if named else cloudpickle.loads(wanted)
    ids = record.metadata["prompt_ids"], record.tokens
    returned = _known[wanted](record.prompt, record.completion, *ids, **record.source_record)
    return asyncio.run(_result(returned)) if inspect.isawaitable(returned) else returned


async def _result(returned: Any) -> Any:
    return await returned
