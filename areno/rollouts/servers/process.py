"""A server process of a replica: started with a log file of its own, watched, and ended with all that it has started."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from areno.errors import EngineError
from areno.rewards.supervisor import descendants

_END_S = 10.0


class ServerProcess:
    """One server.

    Args:
        command: and its arguments.
        log_file: takes what the server prints.
        environment: variables beside those of this process.
        on_failure: called once, in a thread of this object, when the server ends or is given up.

    Attributes:
        failed: the server has ended, or was given up.
    """

    def __init__(
        self,
        command: Sequence[str],
        log_file: Path | None,
        environment: Mapping[str, str],
        on_failure: Callable[[EngineError], None] = lambda _error: None,
    ) -> None:
        self.command, self.failed = list(command), False
        self._on_failure = on_failure
        self._closing, self._reason = False, ""
        self._lifeline, theirs = socket.socketpair()
        launch = [sys.executable, "-m", "areno.rollouts.servers.launch", str(theirs.fileno()), *command]
        with theirs, open(log_file or os.devnull, "ab") as log:
            log.write(f"{shlex.join(command)}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                launch,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        threading.Thread(target=self._watch, name="areno-server", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """The supervisor, the server and what it has started, as far as they run."""
        return [self._process.pid, *sorted(descendants(self._process.pid))] if self._process.poll() is None else []

    def abandon(self, reason: str) -> None:
        """End the server as one that has failed."""
        self._reason = self._reason or reason
        self._lifeline.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the server; a second call does nothing."""
        if self._closing:
            return
        self._closing = True
        for pid in self.pids[1:2]:  # the server itself, which then removes what it has in shared memory
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._lifeline.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _watch(self) -> None:
        code = self._process.wait()
        self.failed = True
        if not self._closing:
            ended = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            self._on_failure(EngineError(self._reason or f"the server has ended {ended}"))


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now; a server that finds it taken ends, and is started again with another."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
