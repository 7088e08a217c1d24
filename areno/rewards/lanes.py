"""Lanes: where reward functions run. A process lane can be killed; a thread lane can only be left behind.

A lane takes jobs and answers with the messages of :mod:`areno.rewards.worker`, plus ``["died", text]``. It knows
nothing about deadlines or retries; the runner does.
"""

from __future__ import annotations

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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from typing import Any

from areno.rewards.worker import Job, Message, describe_error, serve, source_file
from areno.types import RewardRecord

_CLOSE_GRACE_S = 1.0
_BOOT = (
    "import importlib, json, sys; settings = json.loads(sys.argv[1]); sys.path[:] = settings.pop('sys_path'); "
    "importlib.import_module(settings.pop('module')).main(settings)"
)


class Lane(ABC):
    """What the runner knows about one worker: its place in the pool, its state and the records it holds."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.touched = time.monotonic()  # birth, or the latest exchange
        self.ready = False
        self.is_async = False
        self.waiting: list[int] = []  # given to the worker, not started
        self.running: dict[int, float] = {}  # started, with the time

    @property
    def idle(self) -> bool:
        """Imported, and without work."""
        return self.ready and not self.waiting and not self.running

    @abstractmethod
    def send(self, jobs: list[Job]) -> None:
        """Hand over jobs; the lane must be idle, so that its worker is listening and this cannot block."""


class Pool(ABC):
    """A fixed number of lanes for one reward function."""

    lanes: Sequence[Lane]

    @abstractmethod
    def receive(self, timeout_s: float) -> Iterator[tuple[Lane, Message]]:
        """Messages that have arrived; waits for the first one up to ``timeout_s``. What is not consumed stays."""

    @abstractmethod
    def payload(self, record: RewardRecord) -> Any:
        """What is sent for a record; raises whatever keeps it from being sent."""

    @abstractmethod
    def replace(self, position: int) -> None:
        """Get rid of a lane, whatever it is doing, and start a fresh one in its place."""

    @abstractmethod
    def close(self) -> None:
        """End all lanes."""


class WorkerProcess:
    """A Python process in a session of its own, with a connection: killing it also kills what it has started.

    The process ends when this one does, whatever ends it, once it has called :func:`areno.rewards.worker.end_with_parent`.

    Args:
        module: its ``main(settings)`` is called in the process.
        settings: JSON; ``connection`` and ``lifeline`` are added, as file descriptors.
    """

    def __init__(self, module: str, settings: dict[str, Any]) -> None:
        self.connection, theirs = Pipe()
        self._lifeline, their_lifeline = socket.socketpair()
        settings = {
            **settings,
            "sys_path": [entry for entry in sys.path if isinstance(entry, str)],
            "module": module,
            "connection": theirs.fileno(),
            "lifeline": their_lifeline.fileno(),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(settings)],
            pass_fds=[theirs.fileno(), their_lifeline.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        their_lifeline.close()

    @property
    def pid(self) -> int:
        """Process id, which is also the process group's."""
        return self._process.pid

    def kill(self) -> None:
        """End the process and everything it started, now."""
        self.stop()
        self.close()

    def stop(self) -> None:
        """The same, but leave the connection open for a thread that is reading from it; :meth:`close` must follow."""
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()
        self._lifeline.close()

    def wait(self, timeout_s: float) -> None:
        """Wait for a process that was asked to leave."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # `kill` is next
            self._process.wait(timeout_s)

    def death(self) -> str:
        """How it ended, after its connection has."""
        try:
            code = self._process.wait(timeout=_CLOSE_GRACE_S)
        except subprocess.TimeoutExpired:
            return "its worker process closed the connection to the trainer"
        try:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        except ValueError:
            how = f"signal {-code}"
        return f"its worker process died ({how})"


class ProcessLane(Lane):
    """A worker process for a reward file."""

    def __init__(self, position: int, path: str, timeout_s: float) -> None:
        super().__init__(position)
        self.process = WorkerProcess("areno.rewards.worker", {"path": path, "timeout_s": timeout_s})
        self.connection = self.process.connection

    @property
    def pid(self) -> int:
        """Process id, which is also the process group's."""
        return self.process.pid

    def send(self, jobs: list[Job]) -> None:
        """See :meth:`Lane.send`."""
        with contextlib.suppress(OSError):  # the worker died; `read` reports it
            self.connection.send_bytes(pickle.dumps(jobs))

    def read(self) -> Message:
        """The next message; blocks only while one is arriving."""
        try:
            return json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return ["died", self.process.death()]

    def leave(self) -> None:
        """Ask an idle worker to end on its own; killing it must follow."""
        self.connection.close()


class ProcessPool(Pool):
    """Worker processes for a reward file; each imports it on its own, at once and in parallel."""

    def __init__(self, path: str, timeout_s: float, size: int) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._selector = selectors.DefaultSelector()
        self.lanes: list[ProcessLane] = [self._spawn(position) for position in range(size)]

    def receive(self, timeout_s: float) -> Iterator[tuple[Lane, Message]]:
        """See :meth:`Pool.receive`; one message per lane."""
        for key, _ in self._selector.select(timeout_s):
            yield key.data, key.data.read()

    def payload(self, record: RewardRecord) -> bytes:
        """See :meth:`Pool.payload`."""
        return pickle.dumps(record)

    def replace(self, position: int) -> None:
        """See :meth:`Pool.replace`; the old worker is killed together with everything it started."""
        self._selector.unregister(self.lanes[position].connection)
        self.lanes[position].process.kill()
        self.lanes[position] = self._spawn(position)

    def close(self) -> None:
        """End all workers: idle ones may clean up for a second, the rest is killed."""
        idle = [lane for lane in self.lanes if lane.idle]
        deadline = time.monotonic() + _CLOSE_GRACE_S
        self._selector.close()
        for lane in idle:
            lane.leave()
        for lane in idle:
            lane.process.wait(max(deadline - time.monotonic(), 0))
        for lane in self.lanes:
            lane.process.kill()

    def _spawn(self, position: int) -> ProcessLane:
        lane = ProcessLane(position, self._path, self._timeout_s)
        self._selector.register(lane.connection, selectors.EVENT_READ, lane)
        return lane


class ThreadLane(Lane):
    """A daemon thread: a function that hangs in it cannot be stopped, but does not keep the program alive either."""

    def __init__(
        self, position: int, function: Callable[[RewardRecord], Any], timeout_s: float, outbox: queue.SimpleQueue
    ) -> None:
        super().__init__(position)
        self._inbox: queue.SimpleQueue[list[Job] | None] = queue.SimpleQueue()
        self._outbox = outbox
        threading.Thread(
            target=self._serve, args=(function, timeout_s), name=f"areno-reward-{position}", daemon=True
        ).start()

    def send(self, jobs: list[Job]) -> None:
        """See :meth:`Lane.send`."""
        self._inbox.put(jobs)

    def leave(self) -> None:
        """End the thread once its function returns."""
        self._inbox.put(None)

    def _serve(self, function: Callable[[RewardRecord], Any], timeout_s: float) -> None:
        def send(message: Message) -> None:
            self._outbox.put((self, message))

        try:
            serve(function, self._inbox.get, send, lambda record: record, timeout_s)
        except BaseException as error:
            send(["died", f"its event loop ended: {describe_error(error, source_file(function))}"])


class ThreadPool(Pool):
    """Threads for a Python callable, which need not be importable or picklable."""

    def __init__(self, function: Callable[[RewardRecord], Any], timeout_s: float, size: int) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._outbox: queue.SimpleQueue[tuple[Lane, Message]] = queue.SimpleQueue()
        self.lanes: list[ThreadLane] = [self._spawn(position) for position in range(size)]

    def receive(self, timeout_s: float) -> Iterator[tuple[Lane, Message]]:
        """See :meth:`Pool.receive`; what lanes say that were left behind is dropped."""
        try:
            lane, message = self._outbox.get(timeout=timeout_s)
        except queue.Empty:
            return
        if self.lanes[lane.position] is lane:
            yield lane, message

    def payload(self, record: RewardRecord) -> RewardRecord:
        """See :meth:`Pool.payload`."""
        return record

    def replace(self, position: int) -> None:
        """See :meth:`Pool.replace`; a thread that hangs stays behind."""
        self.lanes[position].leave()
        self.lanes[position] = self._spawn(position)

    def close(self) -> None:
        """See :meth:`Pool.close`; threads end when their function returns."""
        for lane in self.lanes:
            lane.leave()

    def _spawn(self, position: int) -> ThreadLane:
        return ThreadLane(position, self._function, self._timeout_s, self._outbox)
