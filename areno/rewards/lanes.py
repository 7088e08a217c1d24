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
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

from areno.rewards.worker import Job, Message, describe_error, serve, source_file
from areno.types import RewardRecord

_CLOSE_GRACE_S = 1.0
_BOOT = (
    "import json, sys; settings = json.loads(sys.argv[1]); sys.path[:] = settings.pop('sys_path'); "
    "from areno.rewards.worker import main; main(settings)"
)


class Lane:
    """What the runner knows about one worker: its state and the records it holds."""

    def __init__(self) -> None:
        self.born = time.monotonic()
        self.ready = False
        self.is_async = False
        self.waiting: list[int] = []  # given to the worker, not started
        self.running: dict[int, float] = {}  # started, with the time
        self.pace_s: float | None = None  # how long the last record took

    @property
    def idle(self) -> bool:
        """Imported, and without work."""
        return self.ready and not self.waiting and not self.running


class ProcessLane(Lane):
    """A worker process in a session of its own, so that killing it also kills what its function started."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__()
        self.connection, theirs = Pipe()
        self._lifeline, their_lifeline = socket.socketpair()
        settings = {
            "sys_path": sys.path,
            "path": path,
            "connection": theirs.fileno(),
            "lifeline": their_lifeline.fileno(),
            "timeout_s": timeout_s,
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

    def send(self, jobs: list[Job]) -> None:
        """Hand over jobs; the lane must be idle, so that its worker is reading and this cannot block."""
        with contextlib.suppress(OSError):  # the worker died; `read` reports it
            self.connection.send_bytes(pickle.dumps(jobs))

    def read(self) -> Message:
        """The next message; blocks only while one is arriving."""
        try:
            return json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return ["died", self._death()]

    def kill(self) -> None:
        """End the process and everything it started, now."""
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        self.connection.close()
        self._lifeline.close()

    def finish(self) -> None:
        """Let an idle worker leave on its own."""
        self.connection.close()

    def _death(self) -> str:
        try:
            code = self._process.wait(timeout=_CLOSE_GRACE_S)
        except subprocess.TimeoutExpired:
            return "its worker process closed the connection to the trainer"
        try:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        except ValueError:
            how = f"signal {-code}"
        return f"its worker process died ({how})"


class ProcessPool:
    """Worker processes for a reward file."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._selector = selectors.DefaultSelector()

    def spawn(self) -> ProcessLane:
        """Start a worker; its import of the file goes on in parallel."""
        lane = ProcessLane(self._path, self._timeout_s)
        self._selector.register(lane.connection, selectors.EVENT_READ, lane)
        return lane

    def receive(self, timeout_s: float) -> list[tuple[Lane, Message]]:
        """Messages of all workers; waits for the first one up to ``timeout_s``."""
        return [(key.data, key.data.read()) for key, _ in self._selector.select(timeout_s)]

    def payload(self, record: RewardRecord) -> bytes:
        """What is sent for a record."""
        return pickle.dumps(record)

    def retire(self, lane: Lane) -> None:
        """Kill a worker."""
        assert isinstance(lane, ProcessLane)
        self._selector.unregister(lane.connection)
        lane.kill()

    def close(self, lanes: list[Lane]) -> None:
        """End all workers: idle ones may clean up for a second, the rest is killed."""
        deadline = time.monotonic() + _CLOSE_GRACE_S
        processes = [lane for lane in lanes if isinstance(lane, ProcessLane)]
        idle = [lane for lane in processes if lane.idle]
        for lane in processes:
            self._selector.unregister(lane.connection)
        for lane in idle:
            lane.finish()
        for lane in idle:
            with contextlib.suppress(subprocess.TimeoutExpired):
                lane._process.wait(max(deadline - time.monotonic(), 0))
        for lane in processes:
            lane.kill()
        self._selector.close()
