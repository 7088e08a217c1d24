"""A worker process, which :class:`WorkerGroup` starts as ``python -m areno.engine.parallel.worker``.

The worker creates the object that its first message describes. Afterwards, the worker calls the object's methods, one after the
other. A call marked ``now`` runs at once, in the thread that reads messages. A separate thread sends a heartbeat every second.
The worker exits when the process that started it exits.
"""

import faulthandler
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import psutil

import areno  # noqa: F401  (before torch: areno sets how long idle threads spin)
from areno.engine.heartbeat import HEARTBEAT
from areno.engine.parallel.messages import Beat, Call, CallResult, Event, LogLine, Start, dumps, loads
from areno.errors import EngineError
from areno.frames import Frames
from areno.launch.links import Connection, dial

BEAT_S = 1.0
# A process that does less than this between two beats is waiting or polling.
_WORKING_SHARE, _WORKING_BYTES = 0.02, 4096


class _Worker:
    def __init__(self, frames: Frames, far: bool) -> None:
        self._frames, self._far = frames, far
        self._sending = threading.Lock()
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._doing = "starting"
        self._target: Any = None

    def run(self) -> None:
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        start: Start = loads(self._frames.receive())
        threading.Thread(target=self._beat, name="areno-beat", daemon=True).start()
        self._forward_logs(start.own_log)
        if self._far:
            sys.path += [folder for folder in start.search_path if folder not in sys.path]
        else:
            sys.path[:] = start.search_path
        import torch

        from areno.engine.cpu_threads import CPU_THREADS

        torch.set_num_threads(start.threads)
        CPU_THREADS.share(start.sharing, os.getppid(), fixed=start.sharing == 0)
        self._answer(Call(0, "start"), lambda: self._make(start))
        threading.Thread(target=self._read, name="areno-reader", daemon=True).start()
        while (call := self._calls.get()) is not None:
            self._doing = call.method
            self._perform(call)
            self._doing = ""

    def _make(self, start: Start) -> None:
        self._target = start.make(lambda payload: self._send(Event(payload)))
        self._doing = ""

    def _perform(self, call: Call) -> None:
        self._answer(call, lambda: attrgetter(call.method)(self._target)(*_arguments(call)))

    def _answer(self, call: Call, work: Any) -> None:
        HEARTBEAT.tick()
        try:
            answer = CallResult(call.number, work())
        except BaseException as error:
            answer = CallResult(call.number, error=error, trace=traceback.format_exc())
        HEARTBEAT.tick()
        try:
            if answer.error is not None:
                loads(dumps(answer.error))  # some exceptions can be pickled but not unpickled
            self._send(answer)
        except Exception as error:  # the result cannot be pickled
            content = answer.error or answer.value
            plain = RuntimeError(f"{type(content).__name__}: {content} ({error})")
            self._send(CallResult(call.number, error=plain, trace=answer.trace or traceback.format_exc()))

    def _read(self) -> None:
        while True:
            try:
                call: Call = loads(self._frames.receive())
            except (EOFError, OSError):
                os._exit(1)  # the starting process has ended
            if call.now:
                self._perform(call)
            else:
                self._calls.put(call if call.method else None)

    def _beat(self) -> None:
        steps, before = 0, (0.0, 0)
        while True:
            now = time.process_time() - time.thread_time(), _io_bytes()  # without the time of this thread
            # During startup any computation or I/O counts as progress.
            if now[0] - before[0] > _WORKING_SHARE * BEAT_S or now[1] - before[1] > _WORKING_BYTES:
                steps += 1
            before = now
            self._send(Beat(HEARTBEAT.count + (steps if self._doing == "starting" else 0), self._doing))
            time.sleep(BEAT_S)

    def _send(self, message: Any) -> None:
        text = dumps(message)
        try:
            with self._sending:
                self._frames.send(text)
        except OSError:
            os._exit(1)

    def _forward_logs(self, own_log: bool) -> None:
        root = logging.getLogger("areno")
        root.setLevel(logging.INFO)
        root.addHandler(_Forward(self._send))
        if own_log:
            lines = logging.StreamHandler()
            lines.setFormatter(logging.Formatter(f"%(asctime)s {os.getpid()} %(levelname)s %(name)s: %(message)s"))
            root.addHandler(lines)


def _arguments(call: Call) -> tuple[Any, ...]:
    try:
        arguments: tuple[Any, ...] = loads(call.arguments)
    except Exception as error:
        raise EngineError(
            f"the worker processes cannot load the arguments of {call.method}: {type(error).__name__}: {error}; put every "
            "module that the arguments need on the module search path before areno starts"
        ) from error
    return arguments


class _Forward(logging.Handler):
    def __init__(self, send: Callable[[LogLine], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(LogLine(record.name, record.levelno, self.format(record)))


def _io_bytes() -> int:
    """Return the approximate number of bytes that this process has read and written; 0 if the number is unknown.

    Reads of memory-mapped files are included.
    """
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            counts = dict(line.split(": ") for line in file)
        return sum(int(counts[name]) for name in ("rchar", "wchar", "read_bytes"))
    except (OSError, KeyError):
        return 0


def _use_interface(connection: Connection) -> None:
    """Use the network interface of this connection for CPU collectives. An existing ``GLOO_SOCKET_IFNAME`` is kept."""
    address = connection.socket.getsockname()[0]
    interfaces = psutil.net_if_addrs().items()
    names = (name for name, addresses in interfaces if any(one.address == address for one in addresses))
    if (name := next(names, None)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def main() -> None:
    """Run the worker until the starting process stops it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the starting process handles it
    connection = dial()
    if connection.far:
        # A scheduler signals all processes; the starting process first saves, and then ends this process.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _use_interface(connection)
    _Worker(connection.frames(), connection.far).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of process groups cannot be joined


if __name__ == "__main__":
    main()
