"""Runs the FastAPI application of :mod:`areno.serving.app` in a background thread or in the main thread.

If a server runs in the main thread, a signal shuts it down gracefully.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from areno.errors import ArenoError, EngineError, UsageError
from areno.serving.app import create_app
from areno.serving.connections import BoundedProtocol
from areno.serving.service import Service

if TYPE_CHECKING:
    from areno.engine.backend import Backend

_STOP_TIMEOUT_S = 10.0


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Port 0 selects a free port. Raises UsageError if the address is unavailable."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        raise UsageError(
            f"cannot listen at --host {host} --port {port}: {error.strerror or error}; choose another port, or "
            "0 for a free port"
        ) from error
    return sock


def address_of(sock: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine as ``asyncio.run`` does. If uvloop is installed, its event loop is used."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        from uvloop import new_event_loop as factory
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


class AppServer(uvicorn.Server):
    """uvicorn without its signal handlers. ``max_connections`` limits the number of open connections; None: unlimited."""

    def __init__(self, app: FastAPI, max_connections: int | None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=functools.partial(BoundedProtocol, max_connections),  # type: ignore[arg-type]
                ws="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                server_header=False,
                proxy_headers=False,  # client addresses are not used
                timeout_graceful_shutdown=_STOP_TIMEOUT_S,  # type: ignore[arg-type]
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing, so that the process keeps its signal handlers."""
        yield


class ServerThread:
    """Runs a server in a thread. Port 0 selects a free port. Raises UsageError if the address is unavailable."""

    def __init__(self, service: Service, host: str = "127.0.0.1", port: int = 0) -> None:
        self.service = service
        self._socket = listen(host, port)
        self.url = address_of(self._socket)
        self.base_url = f"{self.url}/v1"  # for OpenAI clients
        self._server = AppServer(create_app(service), service.config.max_connections)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: run_loop(self._serve()), name="areno-serving", daemon=True)
        self._thread.start()
        self._started.wait()

    async def _serve(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        self._started.set()
        serving = asyncio.create_task(self._server.serve([self._socket]))
        await self._stopped.wait()
        await self.service.drain(0)
        self._server.should_exit = True
        await serving

    def stop(self) -> None:
        """Cancel running requests, and stop the thread. Raises EngineError if the thread does not stop in time."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(_STOP_TIMEOUT_S * 2)
        self.service.close()
        if self._thread.is_alive():
            raise EngineError(f"the server at {self.url} did not stop within {_STOP_TIMEOUT_S * 2:g} s")

    def __enter__(self) -> ServerThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@dataclass
class ForegroundServer:
    """Serves from the main thread until a signal arrives. The server responds even while the model is loading."""

    service: Service
    load: Callable[[], Backend]  # creates the engine; runs in a thread
    sock: socket.socket
    drain_timeout_s: float  # seconds that running requests get to finish at shutdown
    print_status: Callable[[str], None]  # prints lines about the server's state
    engine: Backend | None = field(default=None, init=False)
    error: BaseException | None = field(default=None, init=False)

    def serve(self) -> None:
        """Serve until a signal arrives, and then finish the running requests.

        A second signal cancels the running requests. Without a second signal, they are cancelled ``drain_timeout_s`` seconds
        after the first. Raises ArenoError if loading the model failed.
        """
        run_loop(self._serve())
        if self._loading.is_alive():
            # Loading cannot be interrupted, and needs no cleanup.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        if self.engine is not None:
            self.engine.close()
        if self.error is not None:
            raise self.error

    def __post_init__(self) -> None:
        self._loading = threading.Thread(target=self._load, name="areno-loading", daemon=True)
        self._server = AppServer(create_app(self.service), self.service.config.max_connections)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop_requested = asyncio.Event()  # set by a signal, or because loading failed
        self._cancel_requested = asyncio.Event()  # set by a second signal
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        self.print_status(f"{self.service.config.model_name} at {address_of(self.sock)}/v1 (loading the model)")
        serving = asyncio.create_task(self._server.serve([self.sock]))
        self._loading.start()
        await self._stop_requested.wait()
        await self._drain()
        self._server.should_exit = True
        await serving
        self.service.close()

    async def _drain(self) -> None:
        running = self.service.open_samples
        if running:
            self.print_status(
                f"finishing {running} samples within {self.drain_timeout_s:g} s; send a second signal to cancel the samples"
            )
        draining = asyncio.create_task(self.service.drain(self.drain_timeout_s))
        cancelling = asyncio.create_task(self._cancel_requested.wait())
        await asyncio.wait((draining, cancelling), return_when=asyncio.FIRST_COMPLETED)
        cancelling.cancel()
        if not draining.done():
            draining.cancel()
            await self.service.drain(0)

    def _on_signal(self) -> None:
        (self._cancel_requested if self._stop_requested.is_set() else self._stop_requested).set()

    def _load(self) -> None:
        try:
            self.engine = self.load()
            self.service.attach(self.engine)
            self.print_status("ready")
        except ArenoError as error:
            self._fail(error)
        except BaseException as error:
            failure = EngineError(f"loading the model failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail(failure)

    def _fail(self, error: ArenoError) -> None:
        self.error = error
        self.service.failure = str(error)
        with contextlib.suppress(RuntimeError):  # the event loop is already closed
            self._loop.call_soon_threadsafe(self._stop_requested.set)
