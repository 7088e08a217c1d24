"""Sending a user's function or agent to another process, wherever it was defined; loads neither torch nor a model."""

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
    """Module and name, for messages."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"


def pickled(thing: Any, option: str) -> bytes:
    """Pickle so that another process can load it, and needs no more of its module than it uses; ``option`` names it in errors.

    What is defined in a user's own file goes by value: the file may load a whole trainer, which a worker should not, and may
    be one that no other process can import. What comes from a package goes by name.
    """
    own = getattr(thing, "func", thing)
    module = sys.modules.get(getattr(own, "__module__", None) or "")
    by_value = module is not None and module.__name__ != "__main__" and not _is_packaged(module)
    try:
        if by_value:
            cloudpickle.register_pickle_by_value(module)
        return bytes(cloudpickle.dumps(thing))
    except Exception as error:
        raise UsageError(
            f"{option} {name_of(thing)} cannot be sent to a worker process: {type(error).__name__}: {error}; open what it "
            "needs inside of it, or give its name as text"
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
