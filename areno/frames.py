"""Messages between two processes over a socket pair: whole, of limited size, and never waited for without a deadline.

A frame is the connection's key, the length of the body, and the body. The starting side draws the key and sends it first.
Bytes that something else writes into the socket lack the key, so they are an error at once instead of a length to wait for.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
import sys
from collections import deque
from contextlib import suppress

from areno.errors import ArenoError

_KEY_BYTES = 16
_HEADER = struct.Struct(f">{_KEY_BYTES}sQ")
_CHUNK, _CHUNKS = 1 << 16, 64
_LONGEST_WAIT_S = 60.0


class FrameError(ArenoError):
    """What has arrived is not a message of the other side."""


class Frames:
    """One end of a connection with a ``key``; bodies of more than ``limit`` bytes are refused.

    One thread at a time may read from it, and one may write to it.
    """

    def __init__(self, sock: socket.socket, key: bytes, limit: int) -> None:
        sock.setblocking(False)
        self._socket, self._key, self._limit = sock, key, limit
        self._buffer = bytearray()
        self._whole: deque[bytes] = deque()
        self._end: Exception | None = None

    @classmethod
    def pair(cls, limit: int) -> tuple[Frames, socket.socket]:
        """One end for this process, and the socket that another one hands to :meth:`join`."""
        ours, theirs = socket.socketpair()
        key = secrets.token_bytes(_KEY_BYTES)
        ours.sendall(key)
        return cls(ours, key, limit), theirs

    @classmethod
    def join(cls, file: int) -> Frames:
        """The other end, from its file descriptor; it trusts the starting side."""
        sock = socket.socket(fileno=file)
        return cls(sock, sock.recv(_KEY_BYTES, socket.MSG_WAITALL), sys.maxsize)

    def fileno(self) -> int:
        """File descriptor, for a selector."""
        return self._socket.fileno()

    def arrived(self) -> list[bytes]:
        """All messages that have arrived whole; does not wait for the rest of one.

        An `EOFError` if the other side is gone and none is left; a `FrameError` if no message follows, or too large a one.
        """
        self._read()
        found = list(self._whole)
        self._whole.clear()
        if not found and self._end is not None:
            raise self._end
        return found

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Wait for the next message; ``timeout_s`` is how long no byte of it may come, None as long as the other side lives.

        The errors of :meth:`arrived`, and a `TimeoutError`.
        """
        while not self._whole:
            self._wait(select.POLLIN, timeout_s)
            self._read()
            if not self._whole and self._end is not None:
                raise self._end
        return self._whole.popleft()

    def send(self, body: bytes, timeout_s: float | None = None) -> None:
        """Write a message; if the other side takes nothing off for ``timeout_s``, the connection cannot be used any more.

        An `OSError` if the other side is gone, or does not read (`TimeoutError`).
        """
        parts = [memoryview(_HEADER.pack(self._key, len(body))), memoryview(body)]
        while parts:
            try:
                sent = self._socket.sendmsg(parts)
            except BlockingIOError:
                self._wait(select.POLLOUT, timeout_s)
                continue
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]

    def close(self) -> None:
        """Let go of the connection."""
        self._socket.close()

    def _wait(self, event: int, timeout_s: float | None) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        left = timeout_s
        while left is None or left > 0:
            step = _LONGEST_WAIT_S if left is None else min(left, _LONGEST_WAIT_S)
            if poll.poll(step * 1000):
                return
            left = None if left is None else left - step
        raise TimeoutError(f"the other side has not moved for {timeout_s:g} s")

    def _read(self) -> None:
        """Take in what is there, and cut it into messages."""
        for _ in range(_CHUNKS):
            if self._end is not None:
                return
            try:
                chunk = self._socket.recv(_CHUNK)
            except BlockingIOError:
                return
            except OSError:
                chunk = b""
            if not chunk:
                self._end = EOFError("the other side has closed the connection")
                return
            self._buffer += chunk
            self._cut()

    def _cut(self) -> None:
        while self._buffer:
            if not self._key.startswith(bytes(self._buffer[:_KEY_BYTES])):
                return self._break("something that is no message was written to the connection")
            if len(self._buffer) < _HEADER.size:
                return
            _, size = _HEADER.unpack_from(self._buffer)
            if size > self._limit:
                return self._break(f"a message of {size:,} bytes was announced, the limit is {self._limit:,}")
            end = _HEADER.size + size
            if len(self._buffer) < end:
                return
            self._whole.append(bytes(memoryview(self._buffer)[_HEADER.size : end]))
            del self._buffer[:end]

    def _break(self, problem: str) -> None:
        self._end = FrameError(problem)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # so that a selector reports it again, until it has been raised
