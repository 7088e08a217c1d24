"""Starts the server process of a replica, and watches it. Stopping the server also stops its child processes."""

import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from areno.engine.parallel.workers import Processes
from areno.errors import EngineError
from areno.frames import FrameError
from areno.launch.launcher import Task
from areno.launch.local import LocalLauncher
from areno.rewards.supervisor import descendants

_MODULE = "areno.rollouts.servers.run_supervised"
_END_S, _START_S, _PORT_S = 10.0, 300.0, 60.0


class InferenceServerProcess:
    """The process of an inference server.

    If ``processes.launcher`` is set, this launcher chooses the machine of the process. Otherwise, the process runs on this
    machine.

    Args:
        command: the command with arguments. ``{host}`` and ``{port}`` are replaced by the address at which the server listens.
        environment: additional environment variables.
        processes: launcher, log file and startup timeout.
        on_failure: function that is called once, in a thread of this object, if the server exits without :meth:`close`.

    Attributes:
        url: URL of the server.
        failed: whether the server process has exited.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        processes: Processes,
        on_failure: Callable[[EngineError], None] = lambda _error: None,
    ) -> None:
        self.command, self.failed = list(command), False
        self._on_failure = on_failure
        self._closing, self._reason = False, ""
        if processes.log_file is not None:
            with open(processes.log_file, "ab") as log:
                log.write(f"{shlex.join(command)}\n".encode())
        task = Task(
            role=processes.role,
            number=processes.first,
            module=_MODULE,
            arguments=command,
            environment={"PYTHONUNBUFFERED": "1", **environment},
            log_file=processes.log_file,
        )
        [linked] = (processes.launcher or LocalLauncher()).start([task], processes.startup_s or _START_S)
        self._process, self._lifeline = linked.process, linked.connection.socket
        frames = linked.connection.frames()
        try:
            host, port = frames.receive(_PORT_S).decode().split()
        except (EOFError, OSError, ValueError, FrameError) as error:
            self._process.kill()
            self._cut()
            self._lifeline.close()
            raise EngineError(
                "the server process exited or did not respond during startup; see the server's log"
            ) from error
        self.url = f"http://{host}:{port}"
        threading.Thread(target=self._watch, name="areno-server", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the supervisor, the server and the server's child processes. If the server runs on another machine,
        the list contains only the id of the supervisor."""
        if self._process.poll() is not None:
            return []
        return [self._process.pid, *(sorted(descendants(self._process.pid)) if not self._process.node else ())]

    def abandon(self, reason: str) -> None:
        """Stop the server, and report a failure with this reason."""
        self._reason = self._reason or reason
        self._cut()

    def close(self) -> None:
        """Stop the server. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        # SIGTERM first, so that the server can remove its shared memory.
        self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._cut()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._lifeline.close()

    def _cut(self) -> None:
        with suppress(OSError):
            self._lifeline.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        code = self._process.wait()
        self.failed = True
        if not self._closing:
            cause = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            where = f" on {self._process.node}" if self._process.node else ""
            self._on_failure(EngineError(self._reason or f"the server{where} {cause}"))
