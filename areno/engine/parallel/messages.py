"""Messages between the processes of a worker group, and their serialization.

Objects are serialized with ``cloudpickle``, so a loss function may be a closure or come from a user's file.
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
        make: creates the object whose methods the worker runs (see :class:`Call`). The argument of ``make`` is a function that
            sends a value, as the payload of an :class:`Event`, to the process that started the worker.
        sharing: number of processes that share the CPU cores and adapt their thread counts to the load. If 0, the thread
            count is fixed.
    """

    make: Callable[[Callable[[Any], None]], Any]
    search_path: list[str]  # module search path of the process that starts the worker
    threads: int  # number of PyTorch threads
    sharing: int = 0
    own_log: bool = False  # also write log records to stderr, which is then a file


@dataclass(frozen=True, slots=True)
class Call:
    """A request to call a method of the object that :attr:`Start.make` created in the worker.

    ``method`` is the dotted name of the method, relative to this object. If ``now`` is set, the thread that reads messages
    runs the call at once. Otherwise, the call waits until earlier calls have ended.
    """

    number: int
    method: str
    arguments: bytes = b""  # a serialized tuple; if it cannot be loaded, only this call fails
    now: bool = False


@dataclass(frozen=True, slots=True)
class CallResult:
    """The return value of a call, or the exception that the call raised, with its traceback."""

    number: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """A message that a worker sends on its own, not in reply to a call, for example when a request has finished."""

    payload: Any


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat.

    ``progress`` is a counter that increases as long as the worker makes progress. ``doing`` is the name of the running method.
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
    """Serialize an object.

    Functions and classes from a user's file are pickled by value, because other processes cannot import the file's module.
    """
    global _modules
    if len(sys.modules) != _modules:
        modules = sys.modules.copy()  # other threads may be importing
        _modules = len(modules)
        for name in modules:
            if name.startswith("areno_user_"):
                cloudpickle.register_pickle_by_value(modules[name])
    return cloudpickle.dumps(value)


loads = cloudpickle.loads
_modules = 0
