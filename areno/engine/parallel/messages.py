"""What the processes of a worker group say to each other, and how it is written down.

Objects travel with ``cloudpickle``, so a loss may be a closure or come from a file of the user's.
"""

from __future__ import annotations

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
        search_path: of modules, as in the process that asks.
        threads: for PyTorch.
        sharing: processes that share the CPU cores and adapt their threads to what other programs leave; 0 keeps ``threads``.
        own_log: write log records to the error output, too, which is a file.
    """

    make: Callable[[Callable[[Any], None]], Any]
    search_path: list[str]
    threads: int
    sharing: int = 0
    own_log: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A method to call.

    Attributes:
        number: what the answer refers to.
        method: its name; with dots, of a part of the object.
        arguments: positional ones.
        now: at once, in the thread that reads messages; others wait for each other. It must be quick.
    """

    number: int
    method: str
    arguments: tuple[Any, ...] = ()
    now: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What a method has returned, or how it failed.

    Attributes:
        number: of the call.
        value: what was returned.
        error: what was raised; None if nothing was.
        trace: where, as text.
    """

    number: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a worker says on its own."""

    payload: Any


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life.

    Attributes:
        progress: grows while the worker gets on with its work.
        doing: method that runs, or nothing.
    """

    progress: float
    doing: str = ""


@dataclass(frozen=True, slots=True)
class LogLine:
    """A log record of a worker."""

    logger: str
    level: int
    text: str


def dumps(value: Any) -> bytes:
    """Write an object down. Modules made from a user's file go along, as nobody else can import them."""
    global _modules
    if len(sys.modules) != _modules:
        known = sys.modules.copy()  # other threads may be importing
        _modules = len(known)
        for name in known:
            if name.startswith("areno_user_"):
                cloudpickle.register_pickle_by_value(known[name])
    return cloudpickle.dumps(value)


def loads(text: bytes) -> Any:
    """Read what :func:`dumps` wrote."""
    return cloudpickle.loads(text)


_modules = 0
