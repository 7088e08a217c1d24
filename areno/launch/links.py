"""Connections from worker processes on other machines to the process that started them.

A worker connects to the process that started the worker (the starter). In a handshake, worker and starter prove to each other
that they know the run's key, which the worker reads from its environment. After the handshake, every message is signed
(:class:`areno.frames.SignedFormat`), but not encrypted. The starter detects an unreachable worker within 45 s. A worker detects
an unreachable starter within three minutes.
"""

import hashlib
import hmac
import os
import secrets
import socket
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from areno.errors import EngineError
from areno.frames import Frames, SignedFormat

LINK, KEY = "ARENO_LINK", "ARENO_LINK_KEY"
"""Environment variables that tell a worker how to connect to the process that started the worker (the starter).

On a Ray or Slurm cluster, ``LINK`` is ``HOST:PORT/NAME`` (address of the starter, and name of the worker), and ``KEY`` is the
run's key in hex. Otherwise, ``LINK`` is the file descriptor of an inherited socket, and ``KEY`` is not set.
"""

NODE_ADDRESS = "ARENO_NODE_ADDRESS"
"""Environment variable that a worker sets to the address at which other machines reach the worker's machine."""

_NONCE_BYTES, _MAC_BYTES = 32, 32
_HANDSHAKE_S, _PAUSE_S, _DIALS = 10.0, 0.5, 3
_UNPROVEN = 64  # maximum number of unauthenticated connections; further ones are closed
_IDLE_S, _PROBE_S, _PROBES = 10, 5, 4
# Timeouts of unacknowledged data. A worker waits longer, because Ctrl-Z or a debugger may stop the starter for a while.
_STARTER_PATIENCE_S, _WORKER_PATIENCE_S = 45, 180


@dataclass(frozen=True, slots=True)
class Connection:
    """A socket between a worker and the process that started the worker (the starter).

    ``key`` signs the messages; it is None if the worker inherited the socket. ``dials`` is True in the worker, which opens
    the connection, and False in the starter.
    """

    socket: socket.socket
    key: bytes | None
    dials: bool

    @property
    def far(self) -> bool:
        """Whether the worker and the process that started the worker may be on different machines."""
        return self.key is not None

    def frames(self, limit: int = sys.maxsize) -> Frames:
        """Wrap the socket, to send and receive frames.

        Both the worker and the process that started the worker must call this method.
        """
        if self.key is not None:
            return Frames(self.socket, SignedFormat(self.key, self.dials), limit)
        return Frames.follow(self.socket) if self.dials else Frames.lead(self.socket, limit)


class Listener:
    """Accepts connections of workers. A listener must be closed.

    Attributes:
        address: address of the listener, as ``HOST:PORT``.
    """

    def __init__(self, host: str) -> None:
        self._key = secrets.token_bytes(32)
        self._socket = socket.create_server((host, 0), backlog=256)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._expected: dict[str, Future[Connection]] = {}
        self._closed = False
        self._handshakes = threading.BoundedSemaphore(_UNPROVEN)
        threading.Thread(target=self._accept, name="areno-links", daemon=True).start()

    def expect(self, name: str) -> Future[Connection]:
        """Return a future that gets the connection of the worker ``name`` once the worker connects. Names must be unique."""
        future: Future[Connection] = Future()
        self._expected[name] = future
        return future

    def forget(self, name: str) -> None:
        """Stop waiting for the connection of a worker."""
        self._expected.pop(name, None)

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment variables with which the worker ``name`` connects to this listener."""
        return {LINK: f"{self.address}/{name}", KEY: self._key.hex()}

    def close(self) -> None:
        """Accept no more connections. Existing connections stay open."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_PAUSE_S)  # too many open files, for example
                continue
            if self._handshakes.acquire(blocking=False):
                threading.Thread(target=self._prove, args=[sock], name="areno-link", daemon=True).start()
            else:
                sock.close()

    def _prove(self, sock: socket.socket) -> None:
        deadline = time.monotonic() + _HANDSHAKE_S
        try:
            sock.settimeout(_HANDSHAKE_S)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            sock.sendall(nonce)
            name = _receive(sock, _receive(sock, 1, deadline)[0], deadline)
            theirs, mac = _receive(sock, _NONCE_BYTES, deadline), _receive(sock, _MAC_BYTES, deadline)
            transcript = nonce + theirs + name
            future = self._expected.get(name.decode("utf-8", errors="replace"))
            if future is None or not hmac.compare_digest(mac, _mac(self._key, b"worker", transcript)):
                sock.close()
                return
            sock.sendall(_mac(self._key, b"starter", transcript))
            _watch(sock, _STARTER_PATIENCE_S)
            del self._expected[name.decode()]
            future.set_result(Connection(sock, _mac(self._key, b"session", transcript), dials=False))
        except (OSError, KeyError):  # KeyError: another connection took the name
            sock.close()
        finally:
            self._handshakes.release()


def dial() -> Connection:
    """Connect this worker to the process that started the worker.

    This function removes the variables :data:`LINK` and :data:`KEY` from the environment.

    Raises:
        EngineError: the process that started the worker is unreachable, or does not know the run's key.
    """
    link, digits = os.environ.pop(LINK), os.environ.pop(KEY, "")
    if not digits:
        return Connection(socket.socket(fileno=int(link)), None, dials=True)
    connection = _dial(link, bytes.fromhex(digits), _DIALS)
    os.environ.setdefault(NODE_ADDRESS, connection.socket.getsockname()[0])
    return connection


def _dial(link: str, key: bytes, attempts: int) -> Connection:
    address, _, name = link.partition("/")
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + 2 * _HANDSHAKE_S
    try:
        sock = socket.create_connection((host, int(port)), timeout=_HANDSHAKE_S)
        theirs, nonce = _receive(sock, _NONCE_BYTES, deadline), secrets.token_bytes(_NONCE_BYTES)
        transcript = theirs + nonce + name.encode()
        sock.sendall(bytes([len(name.encode())]) + name.encode() + nonce + _mac(key, b"worker", transcript))
        if not hmac.compare_digest(_receive(sock, _MAC_BYTES, deadline), _mac(key, b"starter", transcript)):
            raise EngineError(
                f"the process at {address} does not know the key of this run, so it is not the process that started this worker"
            )
    except OSError as error:
        if attempts > 1:
            time.sleep(_PAUSE_S)
            return _dial(link, key, attempts - 1)
        raise EngineError(f"cannot connect to {address}, the process that started this worker: {error}") from error
    _watch(sock, _WORKER_PATIENCE_S)
    return Connection(sock, _mac(key, b"session", transcript), dials=True)


def _mac(key: bytes, purpose: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(purpose + content, key=key, digest_size=_MAC_BYTES).digest()


def _receive(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        if time.monotonic() > deadline:
            raise TimeoutError("the other process responds too slowly")
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise ConnectionError("the other process has closed the connection")
        data += chunk
    return data


def _watch(sock: socket.socket, patience_s: int) -> None:
    """Enable TCP keepalive and a timeout of ``patience_s`` seconds for unacknowledged data."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": _IDLE_S, "TCP_KEEPINTVL": _PROBE_S, "TCP_KEEPCNT": _PROBES}
    options["TCP_USER_TIMEOUT"] = patience_s * 1000
    for option, value in options.items():
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
