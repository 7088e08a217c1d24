"""Runs the server of ``areno view``: listens on its address, runs the event loop, and stops on a signal."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import anyio.to_thread

from areno.config.parser import Problems
from areno.config.serve_options import key_problems
from areno.errors import UsageError
from areno.serving.server import AppServer, address_of, listen, run_loop
from areno.viewer.app import create_viewer
from areno.viewer.catalog import RunCatalog

PORT = 6333
_LAST_PORT = 65535
_MAX_CONNECTIONS = 256
_THREADS = 8
"""Number of threads that answer requests. More threads would only use more memory."""


@dataclass
class ViewerServer:
    """Serves the runs below a folder.

    Args:
        port: port to listen on. If None, the server uses ``PORT``, or a free port if ``PORT`` is in use.
        key: API key, which is required if ``host`` is not loopback.

    Raises:
        UsageError: the folder, the port or the key is invalid, a required key is missing, or the address is unavailable.
    """

    folder: Path
    host: str = "127.0.0.1"
    port: int | None = None
    key: str | None = None
    notices: list[str] = field(default_factory=list, init=False)
    """Messages to show the user at startup, for example that ``PORT`` is in use and another port was chosen."""

    def __post_init__(self) -> None:
        Problems.raise_all(self._problems())
        if not self.folder.is_dir():
            raise UsageError(f"{self.folder} is not a folder; pass a folder with runs, such as runs/")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._socket = self._listen()
        self.url = address_of(self._socket)

    def serve(self, started: Callable[[], object] = lambda: None) -> None:
        """Serve until SIGTERM, SIGINT or :meth:`stop`. ``started`` is called when the server accepts connections."""
        run_loop(self._serve(started))

    def stop(self) -> None:
        """Stop :meth:`serve` from another thread. If :meth:`serve` is called later, :meth:`serve` returns at once."""
        if self._loop is None:
            self._stopping.set()
            return
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._stopping.set)

    async def _serve(self, started: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        anyio.to_thread.current_default_thread_limiter().total_tokens = _THREADS
        with contextlib.suppress(RuntimeError, ValueError):  # not the main thread
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._stopping.set)
        app = create_viewer(RunCatalog(self.folder), self.key, self._stopping)
        server = AppServer(app, _MAX_CONNECTIONS)
        serving = asyncio.create_task(server.serve([self._socket]))
        started()
        await self._stopping.wait()
        server.should_exit = True
        await serving

    def _problems(self) -> Iterator[str]:
        yield from key_problems(self.host, self.key)
        if self.port is not None and not 0 <= self.port <= _LAST_PORT:
            yield f"--port {self.port} is not between 0 and {_LAST_PORT}; use a port in this range, or 0 for a free port"

    def _listen(self) -> socket.socket:
        if self.port is not None:
            return listen(self.host, self.port)
        try:
            return listen(self.host, PORT)
        except UsageError:
            sock = listen(self.host, 0)
            self.notices.append(f"port {PORT} is in use; areno view uses port {sock.getsockname()[1]} instead")
            return sock
