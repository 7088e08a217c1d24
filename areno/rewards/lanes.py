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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from areno.frames import FrameError, Frames
from areno.rewards.worker import MESSAGE_BYTES, Job, Message, describe_error, parse_message, serve, source_file
from areno.types import RewardRecord

_CLOSE_GRACE_S = 1.0
_END_S = 5.0
_SEND_S = 60.0
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
    """A Python process under a supervisor, with a connection: all that it has started ends with it, however it ends.

    The same happens when this process ends, whatever ends it. The module must call
    :func:`areno.rewards.supervisor.supervised` first.

    Args:
        module: its ``main(settings)`` is called in the process.
        settings: JSON; ``connection`` and ``lifeline`` are added, as file descriptors.
        limit: largest message that it may send, in bytes.
    """

    def __init__(self, module: str, settings: dict[str, Any], limit: int) -> None:
        self.frames, theirs = Frames.pair(limit)
        self._lifeline, their_lifeline = socket.socketpair()
        settings = {
            **settings,
            "sys_path": [entry for entry in sys.path if isinstance(entry, str)],
            "module": module,
            "connection": theirs.fileno(),
            "lifeline": their_lifeline.fileno(),
        }
        with theirs, their_lifeline:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(settings)],
                pass_fds=[theirs.fileno(), their_lifeline.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the supervisor, which is also the process group's."""
        return self._process.pid

    def kill(self) -> None:
        """End the process and everything it started, now."""
        self.stop()
        self.close()

    def stop(self) -> None:
        """The same, but leave the connection open for a thread that is reading from it; :meth:`close` must follow."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            with contextlib.suppress(OSError):  # it has ended by now
                self._lifeline.shutdown(socket.SHUT_RDWR)
            self.wait(_END_S)
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Close the connection."""
        self.frames.close()
        self._lifeline.close()

    def wait(self, timeout_s: float) -> None:
        """Wait for a process that was asked to leave."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # the caller kills it next
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

    def __init__(self, position: int, settings: dict[str, Any]) -> None:
        super().__init__(position)
        self.process = WorkerProcess("areno.rewards.worker", settings, MESSAGE_BYTES)
        self.frames = self.process.frames
        self.arrived: deque[Message] = deque()

    @property
    def pid(self) -> int:
        """Process id, which is also the process group's."""
        return self.process.pid

    def send(self, jobs: list[Job]) -> None:
        """See :meth:`Lane.send`."""
        try:
            self.frames.send(pickle.dumps(jobs), _SEND_S)
        except TimeoutError:
            self.process.stop()
        except OSError:  # the worker died; `read` reports it
            pass

    def read(self) -> None:
        """Take in the messages that have arrived; does not wait."""
        try:
            self.arrived.extend(map(parse_message, self.frames.arrived()))
        except EOFError:
            self.arrived.append(["died", self.process.death()])
        except (FrameError, ValueError) as error:
            self.arrived.append(
                ["died", f"its worker process was stopped, because it does not follow the protocol: {error}"]
            )

    def leave(self) -> None:
        """Ask an idle worker to end on its own; killing it must follow."""
        self.frames.close()


class ProcessPool(Pool):
    """Worker processes for a reward file; each imports it on its own, at once and in parallel."""

    def __init__(self, path: str, timeout_s: float, size: int, memory_bytes: int | None = None) -> None:
        self._settings = {"path": path, "timeout_s": timeout_s, "memory_bytes": memory_bytes}
        self._selector = selectors.DefaultSelector()
        self.lanes: list[ProcessLane] = [self._spawn(position) for position in range(size)]

    def receive(self, timeout_s: float) -> Iterator[tuple[Lane, Message]]:
        """See :meth:`Pool.receive`."""
        for key, _ in self._selector.select(0 if any(lane.arrived for lane in self.lanes) else timeout_s):
            key.data.read()
        for lane in list(self.lanes):
            while lane.arrived and self.lanes[lane.position] is lane:
                yield lane, lane.arrived.popleft()

    def payload(self, record: RewardRecord) -> bytes:
        """See :meth:`Pool.payload`."""
        return pickle.dumps(record)

    def replace(self, position: int) -> None:
        """See :meth:`Pool.replace`; the old worker is killed together with everything it started."""
        self._selector.unregister(self.lanes[position].frames)
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
        lane = ProcessLane(position, self._settings)
        self._selector.register(lane.frames, selectors.EVENT_READ, lane)
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
