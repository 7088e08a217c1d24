"""Pickles users' functions and agents for other processes. Imports neither torch nor model code."""

import asyncio
import inspect
import sys
from types import ModuleType
from typing import Any

import cloudpickle

from areno.config.hooks import named_object
from areno.errors import UsageError
from areno.types import RewardRecord


def name_of(thing: Any) -> str:
    """Return the qualified name of an object or of its class, for messages."""
    definition = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{getattr(definition, '__module__', '')}.{definition.__qualname__}"


def pickled(thing: Any, option: str) -> bytes:
    """Pickle an object for another process. Error messages mention ``option``.

    Objects of installed packages are pickled by reference. Objects that are defined in a user's file are pickled by value, so
    that the other process need not import this file. The import may fail or load a whole trainer.
    """
    function = getattr(thing, "func", thing)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    by_value = module is not None and module.__name__ != "__main__" and not _is_packaged(module)
    try:
        if by_value:
            cloudpickle.register_pickle_by_value(module)
        return bytes(cloudpickle.dumps(thing))
    except Exception as error:
        by_name = ", or set reward_fn to a string such as 'package.module.function'" if option == "reward_fn" else ""
        raise UsageError(
            f"{option} {name_of(thing)} cannot be pickled for a worker process: {type(error).__name__}: {error}; create "
            f"resources (such as clients and locks) only inside the called function{by_name}"
        ) from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _is_packaged(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None) or ""
    return (
        not file or "site-packages" in file or module.__name__.partition(".")[0] in ("areno", *sys.stdlib_module_names)
    )


class RewardCall:
    """Calls a workflow's reward function for one sample, which a :class:`RewardRecord` describes.

    The function gets four positional arguments: prompt and completion as text, and the token ids of both. It also gets the
    columns of the data row as keyword arguments. ``sent`` is the pickled function or its name.
    """

    def __init__(self, sent: bytes | str) -> None:
        # Error messages find the function's file through the attribute ``func``.
        self.func = named_object(sent, option="reward_fn") if isinstance(sent, str) else cloudpickle.loads(sent)

    def __call__(self, record: RewardRecord) -> Any:
        """Return the result of the reward function. If this result is a coroutine, run it, and return its result instead."""
        ids = record.metadata["prompt_ids"], record.tokens
        returned = self.func(record.prompt, record.completion, *ids, **record.source_record)
        return asyncio.run(_result(returned)) if inspect.isawaitable(returned) else returned


async def _result(returned: Any) -> Any:
    return await returned
