"""What the processes of a worker group say to each other, and how it is written down.

Objects travel with ``cloudpickle``, so a loss may be a closure or come from a file of the user's.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a worker.

    Attributes:
        make: makes the object whose methods are called, given a way to send :class:`Event` payloads.
        sharing: processes that share the CPU cores and adapt their threads to what other programs leave; 0 keeps ``threads``.
    """

    make: Callable[[Callable[[Any], None]], Any]
    search_path: list[str]  # of modules, as in the process that asks
    threads: int  # for PyTorch
    sharing: int = 0
    own_log: bool = False  # write log records to the error output, too, which is a file


@dataclass(frozen=True, slots=True)
class Call:
    """A method to call, with dots one of a part of the object; ``now``: at once, in the thread that reads messages."""

    number: int
    method: str
    arguments: tuple[Any, ...] = ()
    now: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What the method of a call has returned, or what it raised, and where as text."""

    number: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a worker sends on its own."""

    payload: Any


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life; ``progress`` grows while the worker gets on with its work, ``doing`` is the method that runs."""

    progress: float
    doing: str = ""


@dataclass(frozen=True, slots=True)
class LogLine:
    """A log record of a worker."""

    logger: str
    level: int
    text: str


def dumps(value: Any) -> bytes:
    """Serialize an object, with modules made from a user's file, as nobody else can import them."""
    global _modules
    if len(sys.modules) != _modules:
        known = sys.modules.copy()  # other threads may be importing
        _modules = len(known)
        for name in known:
            if name.startswith("areno_user_"):
                cloudpickle.register_pickle_by_value(known[name])
    return cloudpickle.dumps(value)


loads = cloudpickle.loads
_modules = 0
