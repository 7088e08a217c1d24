"""The inside of a reward worker: calls ``reward_fn(prompt, completions, prompt_ids, completion_ids, **data)``.

Loads neither torch nor a model; only what the function itself needs.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import cloudpickle

from areno.config.hooks import named_object
from areno.types import RewardRecord


class RewardCall:
    """A reward function of workflows, pickled or by its name, as one of records."""

    def __init__(self, sent: bytes | str) -> None:
        # Under this name its file is found, which errors are told with.
        self.func = named_object(sent, option="reward_fn") if isinstance(sent, str) else cloudpickle.loads(sent)

    def __call__(self, record: RewardRecord) -> Any:
        """Call the function; a coroutine function is run to its end."""
        ids = record.metadata["prompt_ids"], record.tokens
        returned = self.func(record.prompt, record.completion, *ids, **record.source_record)
        return asyncio.run(_result(returned)) if inspect.isawaitable(returned) else returned


async def _result(returned: Any) -> Any:
    return await returned
