"""Sending a user's function or agent to another process, wherever it was defined."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import cloudpickle

from areno.errors import UsageError


def name_of(thing: Any) -> str:
    """Module and name, for messages."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"


def pickled(thing: Any, option: str) -> bytes:
    """Pickle by name what another process can import, and by value what it cannot: closures, and files loaded by path.

    Args:
        thing: a function or an object.
        option: names it in messages.

    Raises:
        UsageError: it cannot be pickled.
    """
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    by_value = module is not None and module.__name__ != "__main__" and not _can_be_imported(module.__name__)
    try:
        if by_value:
            cloudpickle.register_pickle_by_value(module)
        return bytes(cloudpickle.dumps(thing))
    except Exception as error:
        raise UsageError(
            f"{option} {name_of(thing)} cannot be sent to a worker process: {type(error).__name__}: {error}; define it at "
            "the top of a module, and open what it needs inside of it"
        ) from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _can_be_imported(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
