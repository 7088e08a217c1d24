"""Sending a user's function or agent to another process, wherever it was defined."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import cloudpickle

from areno.errors import UsageError


def name_of(thing: Any) -> str:
    """Module and name, for messages."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"


def pickled(thing: Any, option: str) -> bytes:
    """Pickle so that another process can load it, and needs no more of its module than it uses.

    What is defined in a user's own file goes by value: the file may load a whole trainer, which a worker should not, and may
    be one that no other process can import. What comes from a package goes by name.

    Raises:
        UsageError: it cannot be pickled; ``option`` names it.
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
