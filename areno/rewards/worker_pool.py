"""Workers that run reward functions. A worker process can be killed. A worker thread can only be abandoned.

A worker receives jobs, and replies with the messages of :mod:`areno.rewards.worker`. When a worker ends,
:meth:`WorkerSlot.read` adds the message ``["died", text]`` to these replies.
:class:`areno.rewards.runner.RewardRunner` handles deadlines and retries.
"""

import contextlib
import json
import os
import pickle
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from areno.frames import FrameError, Frames
from areno.python_process import python_command
from areno.rewards.worker import MESSAGE_BYTES, Message, RewardJob, Scorer, describe_error, parse_message, source_file
from areno.types import RewardRecord

_CLOSE_GRACE_S = 1.0
_STOP_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 60.0
_BOOT = (
    "import importlib, json, sys; settings = json.loads(sys.argv[1]); sys.path[:] = settings.pop('sys_path'); "
    "importlib.import_module(settings.pop('module')).main(settings)"
)


class WorkerProcess:
    """A supervised Python process that exchanges messages with the process that started it.

    If its parent exits, the process is killed. When the process exits for any reason, all its descendants are killed.

    Args:
        module: module whose ``main(settings)`` runs in the process. ``main`` must first call
            :func:`areno.rewards.supervisor.supervised`, which starts the supervisor.
        settings: argument of ``main``, which must be convertible to JSON. ``main`` also gets the keys
            ``connection`` and ``lifeline``, whose values it must pass to ``supervised``.
        limit: maximum message size in bytes.
    """

    def __init__(self, module: str, settings: dict[str, Any], limit: int) -> None:
        self.frames, worker_end = Frames.pair(limit)
        self._lifeline, worker_lifeline = socket.socketpair()
        settings = {
            **settings,
            "sys_path": [entry for entry in sys.path if isinstance(entry, str)],
            "module": module,
            "connection": worker_end.fileno(),
            "lifeline": worker_lifeline.fileno(),
        }
        with worker_end, worker_lifeline:
            self._process = subprocess.Popen(
                [*python_command(), "-c", _BOOT, json.dumps(settings)],
                pass_fds=[worker_end.fileno(), worker_lifeline.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill the process and its descendants."""
        self.stop()
        self.close()

    def stop(self) -> None:
        """Kill the process. The connection stays open until :meth:`close`, because another thread may still read from it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            with contextlib.suppress(OSError):  # already ended
                self._lifeline.shutdown(socket.SHUT_RDWR)
            self.wait(_STOP_TIMEOUT_S)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Close the connection."""
        self.frames.close()
        self._lifeline.close()

    def wait(self, timeout_s: float) -> None:
        """Wait for the process to exit."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # the caller kills it next
            self._process.wait(timeout_s)

    def exit_reason(self) -> str:
        """Return why the process exited. Call this method after the process has closed the connection."""
        try:
            code = self._process.wait(timeout=_CLOSE_GRACE_S)
        except subprocess.TimeoutExpired:
            return "its worker process closed the connection to the trainer"
        try:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        except ValueError:
            how = f"signal {-code}"
        return f"its worker process died ({how})"


class RewardProcess(WorkerProcess):
    """A worker process for a reward file."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__("areno.rewards.worker", settings, MESSAGE_BYTES)

    def payload(self, record: RewardRecord) -> Any:
        """Pickle a record. Pickling errors propagate."""
        return pickle.dumps(record)

    def submit(self, jobs: list[RewardJob]) -> None:
        """Send jobs to an idle worker. A worker that does not read them within a minute is killed."""
        try:
            self.frames.send(pickle.dumps(jobs), _SEND_TIMEOUT_S)
        except TimeoutError:
            self.stop()
        except OSError:  # the worker died; this is reported when reading from it
            pass

    def request_exit(self) -> None:
        """Ask an idle worker to exit."""
        self.frames.close()


class RewardThread:
    """A daemon thread that runs a callable. The callable need be neither importable nor picklable.

    The thread has the methods of `RewardProcess` that the pool and the runner use. A hanging function cannot be stopped, but
    the program can exit.
    """

    def __init__(self, function: Callable[[RewardRecord], Any], timeout_s: float) -> None:
        self.frames, worker_end = Frames.pair(MESSAGE_BYTES)
        self._inbox: queue.SimpleQueue[list[RewardJob] | None] = queue.SimpleQueue()
        self._exit_reason = ""
        arguments = (function, timeout_s, Frames.join(worker_end.detach()))
        self._thread = threading.Thread(target=self._serve, args=arguments, name="areno-reward", daemon=True)
        self._thread.start()

    def payload(self, record: RewardRecord) -> Any:
        """Return the record unchanged."""
        return record

    def submit(self, jobs: list[RewardJob]) -> None:
        """Queue jobs."""
        self._inbox.put(jobs)

    def request_exit(self) -> None:
        """Let the thread end after it has scored the submitted jobs."""
        self._inbox.put(None)

    def wait(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout_s)

    def kill(self) -> None:
        """Close the connection, and let the thread end. If the reward function is running, it continues until it returns."""
        self.request_exit()
        self.frames.close()

    def exit_reason(self) -> str:
        """Return the error that ended the thread; "" if the thread is running or ended without an error."""
        return self._exit_reason

    def _serve(self, function: Callable[[RewardRecord], Any], timeout_s: float, frames: Frames) -> None:
        try:
            Scorer(function, timeout_s, frames, self.payload).serve(self._inbox.get)
        except BaseException as error:
            self._exit_reason = f"its event loop ended: {describe_error(error, source_file(function))}"
        finally:
            frames.close()


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """A slot of the pool: a worker, its state, and the records assigned to the worker."""

    position: int
    worker: RewardProcess | RewardThread
    last_activity: float = field(default_factory=time.monotonic)  # start, or latest message in either direction
    ready: bool = False
    is_async: bool = False
    waiting: list[int] = field(default_factory=list)  # records that are submitted but not started
    running: dict[int, float] = field(default_factory=dict)  # index -> start time
    arrived: deque[Message] = field(default_factory=deque)

    @property
    def idle(self) -> bool:
        """Whether the worker has imported the reward function and has no records to score."""
        return self.ready and not self.waiting and not self.running

    def read(self) -> None:
        """Read the messages that have arrived, without waiting."""
        try:
            self.arrived.extend(map(parse_message, self.worker.frames.arrived()))
        except EOFError:
            self.arrived.append(["died", self.worker.exit_reason()])
        except (FrameError, ValueError) as error:
            self.arrived.append(["died", f"its worker process was stopped because it sent an invalid message: {error}"])


class WorkerPool:
    """A fixed number of workers for one reward function. The workers start in parallel."""

    def __init__(self, spawn: Callable[[], RewardProcess | RewardThread], size: int) -> None:
        self._spawn, self._selector = spawn, selectors.DefaultSelector()
        self.slots: list[WorkerSlot] = [self._started(position) for position in range(size)]

    def receive(self, timeout_s: float) -> Iterator[tuple[WorkerSlot, Message]]:
        """Yield arrived messages. Waits up to ``timeout_s`` for the first message. Unconsumed messages stay queued."""
        for key, _ in self._selector.select(0 if any(slot.arrived for slot in self.slots) else timeout_s):
            key.data.read()
        for slot in list(self.slots):
            while slot.arrived and self.slots[slot.position] is slot:
                yield slot, slot.arrived.popleft()

    def replace(self, position: int) -> None:
        """Kill the worker of a slot and start a new one."""
        self._selector.unregister(self.slots[position].worker.frames)
        self.slots[position].worker.kill()
        self.slots[position] = self._started(position)

    def close(self) -> None:
        """Stop all workers. Idle workers get one second to clean up."""
        idle = [slot for slot in self.slots if slot.idle]
        deadline = time.monotonic() + _CLOSE_GRACE_S
        self._selector.close()
        for slot in idle:
            slot.worker.request_exit()
        for slot in idle:
            slot.worker.wait(max(deadline - time.monotonic(), 0))
        for slot in self.slots:
            slot.worker.kill()

    def _started(self, position: int) -> WorkerSlot:
        slot = WorkerSlot(position, self._spawn())
        self._selector.register(slot.worker.frames, selectors.EVENT_READ, slot)
        return slot
