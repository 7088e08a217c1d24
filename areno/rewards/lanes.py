"""Where reward functions run. A process can be killed; a thread can only be left behind.

A worker takes jobs and answers with the messages of :mod:`areno.rewards.worker`, plus ``["died", text]``. It knows
nothing about deadlines or retries; the runner does.
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
from areno.rewards.worker import MESSAGE_BYTES, Job, Message, Scorer, describe_error, parse_message, source_file
from areno.types import RewardRecord

_CLOSE_GRACE_S = 1.0
_END_S = 5.0
_SEND_S = 60.0
_BOOT = (
    "import importlib, json, sys; settings = json.loads(sys.argv[1]); sys.path[:] = settings.pop('sys_path'); "
    "importlib.import_module(settings.pop('module')).main(settings)"
)


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
            os.killpg(self._process.pid, signal.SIGKILL)
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


class RewardProcess(WorkerProcess):
    """A worker process for a reward file."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__("areno.rewards.worker", settings, MESSAGE_BYTES)

    def payload(self, record: RewardRecord) -> Any:
        """What is sent for a record; raises whatever keeps it from being sent."""
        return pickle.dumps(record)

    def deliver(self, jobs: list[Job]) -> None:
        """Hand over jobs; the worker must be idle, so that it is listening and this cannot block."""
        try:
            self.frames.send(pickle.dumps(jobs), _SEND_S)
        except TimeoutError:
            self.stop()
        except OSError:  # the worker died; its lane reads that
            pass

    def leave(self) -> None:
        """Ask an idle worker to end on its own."""
        self.frames.close()


class RewardThread:
    """A daemon thread for a Python callable, which need not be importable or picklable; methods as in `RewardProcess`.

    A function that hangs in it cannot be stopped, but does not keep the program alive either.
    """

    def __init__(self, function: Callable[[RewardRecord], Any], timeout_s: float) -> None:
        self.frames, theirs = Frames.pair(MESSAGE_BYTES)
        self._inbox: queue.SimpleQueue[list[Job] | None] = queue.SimpleQueue()
        self._death = ""
        arguments = (function, timeout_s, Frames.join(theirs.detach()))
        self._thread = threading.Thread(target=self._serve, args=arguments, name="areno-reward", daemon=True)
        self._thread.start()

    def payload(self, record: RewardRecord) -> Any:
        """The record itself."""
        return record

    def deliver(self, jobs: list[Job]) -> None:
        """Hand over jobs."""
        self._inbox.put(jobs)

    def leave(self) -> None:
        """End the thread once its function returns."""
        self._inbox.put(None)

    def wait(self, timeout_s: float) -> None:
        """Wait for a thread that was asked to leave."""
        self._thread.join(timeout_s)

    def kill(self) -> None:
        """Leave the thread behind, and hear nothing of it any more."""
        self.leave()
        self.frames.close()

    def death(self) -> str:
        """Why it ended by itself."""
        return self._death

    def _serve(self, function: Callable[[RewardRecord], Any], timeout_s: float, frames: Frames) -> None:
        try:
            Scorer(function, timeout_s, frames, self.payload).serve(self._inbox.get)
        except BaseException as error:
            self._death = f"its event loop ended: {describe_error(error, source_file(function))}"
        finally:
            frames.close()


@dataclass(slots=True, eq=False)
class Lane:
    """A worker, its place in the pool, its state and the records it holds."""

    position: int
    worker: RewardProcess | RewardThread
    touched: float = field(default_factory=time.monotonic)  # birth, or the latest exchange
    ready: bool = False
    is_async: bool = False
    waiting: list[int] = field(default_factory=list)  # given to the worker, not started
    running: dict[int, float] = field(default_factory=dict)  # started, with the time
    arrived: deque[Message] = field(default_factory=deque)

    @property
    def idle(self) -> bool:
        """Imported, and without work."""
        return self.ready and not self.waiting and not self.running

    def read(self) -> None:
        """Take in the messages that have arrived; does not wait."""
        try:
            self.arrived.extend(map(parse_message, self.worker.frames.arrived()))
        except EOFError:
            self.arrived.append(["died", self.worker.death()])
        except (FrameError, ValueError) as error:
            self.arrived.append(
                ["died", f"its worker process was stopped, because it does not follow the protocol: {error}"]
            )


class Pool:
    """A fixed number of lanes for one reward function; their workers start at once and in parallel."""

    def __init__(self, spawn: Callable[[], RewardProcess | RewardThread], size: int) -> None:
        self._spawn, self._selector = spawn, selectors.DefaultSelector()
        self.lanes: list[Lane] = [self._started(position) for position in range(size)]

    def receive(self, timeout_s: float) -> Iterator[tuple[Lane, Message]]:
        """Messages that have arrived; waits for the first one up to ``timeout_s``. What is not consumed stays."""
        for key, _ in self._selector.select(0 if any(lane.arrived for lane in self.lanes) else timeout_s):
            key.data.read()
        for lane in list(self.lanes):
            while lane.arrived and self.lanes[lane.position] is lane:
                yield lane, lane.arrived.popleft()

    def replace(self, position: int) -> None:
        """Get rid of a lane, whatever it is doing, and start a fresh one in its place."""
        self._selector.unregister(self.lanes[position].worker.frames)
        self.lanes[position].worker.kill()
        self.lanes[position] = self._started(position)

    def close(self) -> None:
        """End all lanes: idle ones may clean up for a second."""
        idle = [lane for lane in self.lanes if lane.idle]
        deadline = time.monotonic() + _CLOSE_GRACE_S
        self._selector.close()
        for lane in idle:
            lane.worker.leave()
        for lane in idle:
            lane.worker.wait(max(deadline - time.monotonic(), 0))
        for lane in self.lanes:
            lane.worker.kill()

    def _started(self, position: int) -> Lane:
        lane = Lane(position, self._spawn())
        self._selector.register(lane.worker.frames, selectors.EVENT_READ, lane)
        return lane
