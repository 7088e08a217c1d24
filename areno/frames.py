"""Length-prefixed messages between two processes over a socket, with a size limit and timeouts.

On a socket pair, one end (:meth:`Frames.lead`) first sends a random key to the other end (:meth:`Frames.follow`). Every header
then starts with this key. If other code writes stray bytes to the socket, the receiver raises an error instead of reading the
bytes as a length. Connections between machines use :class:`SignedFormat`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import select
import socket
import struct
import sys
from collections import deque
from contextlib import suppress

from areno.errors import ArenoError

_KEY_BYTES = 16
_HEADER, _LENGTH = struct.Struct(f">{_KEY_BYTES}sQ"), struct.Struct(">Q")
_MAC_BYTES = 32
_CHUNK, _CHUNKS = 1 << 16, 64
_LONGEST_WAIT_S = 60.0


class FrameError(ArenoError):
    """The received bytes are not a valid message from the peer."""


class KeyedFormat:
    """Frames of three parts: key, length and body. :class:`SignedFormat` documents the methods."""

    header_bytes, trailer_bytes = _HEADER.size, 0

    def __init__(self, key: bytes) -> None:
        self._key = key

    def begins(self, start: bytes) -> bool:
        """See :class:`SignedFormat`."""
        return self._key.startswith(start[:_KEY_BYTES])

    def written(self, body: bytes) -> tuple[bytes, bytes]:
        """See :class:`SignedFormat`."""
        return _HEADER.pack(self._key, len(body)), b""

    def length(self, header: bytes) -> int | None:
        """See :class:`SignedFormat`."""
        size: int = _HEADER.unpack(header)[1]
        return size

    def check(self, body: memoryview, trailer: bytes) -> bool:
        """See :class:`SignedFormat`."""
        return True


class SignedFormat:
    """Frames whose header and body each carry a MAC. The MAC also covers the direction and the position in the stream.

    Each end detects messages that an attacker on the connection has changed, replayed, dropped, inserted or reflected.

    Args:
        key: shared key of the connection.
        dials: whether this end opened the connection. Each direction has its own key, derived from ``key``.
    """

    header_bytes, trailer_bytes = _LENGTH.size + _MAC_BYTES, _MAC_BYTES

    def __init__(self, key: bytes, dials: bool) -> None:
        self._keys = [hashlib.blake2b(end, key=key).digest() for end in (b"dials", b"answers")]
        if not dials:
            self._keys.reverse()
        self._sent = self._received = 0

    def begins(self, start: bytes) -> bool:
        """Whether ``start`` can be the header of a frame, or the first bytes of a header."""
        return True

    def written(self, body: bytes) -> tuple[bytes, bytes]:
        """Return the header and trailer of the next frame to send."""
        length = _LENGTH.pack(len(body))
        header, trailer = length + self._mac(0, self._sent, b"h", length), self._mac(0, self._sent, b"b", body)
        self._sent += 1
        return header, trailer

    def length(self, header: bytes) -> int | None:
        """Return the length of the next frame's body. If the header is not authentic, return None."""
        length, mac = header[: _LENGTH.size], header[_LENGTH.size :]
        if not hmac.compare_digest(mac, self._mac(1, self._received, b"h", length)):
            return None
        size: int = _LENGTH.unpack(length)[0]
        return size

    def check(self, body: memoryview, trailer: bytes) -> bool:
        """Whether ``body`` is authentic according to its MAC, which is the ``trailer``.

        Call this method once for each received frame, in the order of the frames.
        """
        authentic = hmac.compare_digest(trailer, self._mac(1, self._received, b"b", body))
        self._received += 1
        return authentic

    def _mac(self, end: int, position: int, part: bytes, content: bytes | memoryview) -> bytes:
        digest = hashlib.blake2b(part + _LENGTH.pack(position), key=self._keys[end], digest_size=_MAC_BYTES)
        digest.update(content)
        return digest.digest()


class Frames:
    """One end of a connection that carries messages.

    A message is sent as a frame: a header, a body with the message, and a trailer, which may be empty. If a received body has
    more than ``limit`` bytes, reading raises FrameError. One thread may read while another thread writes.
    """

    def __init__(self, sock: socket.socket, form: KeyedFormat | SignedFormat, limit: int) -> None:
        sock.setblocking(False)
        self._socket, self._form, self._limit = sock, form, limit
        self._buffer = bytearray()
        self._messages: deque[bytes] = deque()
        self._end: Exception | None = None

    @classmethod
    def pair(cls, limit: int) -> tuple[Frames, socket.socket]:
        """Create two connected sockets, and return the first one wrapped in a :class:`Frames`.

        The second socket is for another process, which must call :meth:`join` with the file descriptor of this socket.
        """
        ours, theirs = socket.socketpair()
        return cls.lead(ours, limit), theirs

    @classmethod
    def lead(cls, sock: socket.socket, limit: int) -> Frames:
        """Wrap the socket, create a random key, and send the key to the other end, which must call :meth:`follow`."""
        key = secrets.token_bytes(_KEY_BYTES)
        with suppress(OSError):  # if the peer has closed already, the first read reports it
            sock.sendall(key)
        return cls(sock, KeyedFormat(key), limit)

    @classmethod
    def follow(cls, sock: socket.socket) -> Frames:
        """Wrap the socket, and receive the random key from the other end, which calls :meth:`lead`.

        The size of received messages is not limited.
        """
        return cls(sock, KeyedFormat(sock.recv(_KEY_BYTES, socket.MSG_WAITALL)), sys.maxsize)

    @classmethod
    def join(cls, file: int) -> Frames:
        """Call :meth:`follow` with the socket that has the file descriptor ``file``, and return the result."""
        return cls.follow(socket.socket(fileno=file))

    def fileno(self) -> int:
        """Return the file descriptor, for a selector."""
        return self._socket.fileno()

    def arrived(self) -> list[bytes]:
        """Return the complete messages received so far, without blocking.

        Raises:
            EOFError: the peer has closed the connection, and no message is left.
            FrameError: a message is invalid or too large.
        """
        self._read()
        messages = list(self._messages)
        self._messages.clear()
        if not messages and self._end is not None:
            raise self._end
        return messages

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Wait for the next message. ``timeout_s`` is the maximum time without new bytes; None means no limit.

        Raises the errors of :meth:`arrived`, and TimeoutError.
        """
        while not self._messages:
            self._wait(select.POLLIN, timeout_s)
            self._read()
            if not self._messages and self._end is not None:
                raise self._end
        return self._messages.popleft()

    def send(self, body: bytes, timeout_s: float | None = None) -> None:
        """Write a message. After an error, the connection is unusable.

        Raises:
            OSError: the peer has closed the connection.
            TimeoutError: the peer reads nothing for ``timeout_s``.
        """
        header, trailer = self._form.written(body)
        parts = [memoryview(part) for part in (header, body, trailer) if part]
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
        """Close the connection."""
        self._socket.close()

    def _wait(self, event: int, timeout_s: float | None) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        remaining = timeout_s
        while remaining is None or remaining > 0:
            step = _LONGEST_WAIT_S if remaining is None else min(remaining, _LONGEST_WAIT_S)
            if poll.poll(step * 1000):
                return
            remaining = None if remaining is None else remaining - step
        raise TimeoutError(f"no data exchanged with the peer for {timeout_s:g} s")

    def _read(self) -> None:
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
                self._end = EOFError("the peer has closed the connection")
                return
            self._buffer += chunk
            self._split()

    def _split(self) -> None:
        form = self._form
        while self._buffer:
            header = bytes(self._buffer[: form.header_bytes])
            if not form.begins(header):
                return self._break("received bytes that are not a message")
            if len(header) < form.header_bytes:
                return
            size = form.length(header)
            if size is None:
                return self._break("received a message without a valid signature")
            if size > self._limit:
                return self._break(f"received a message of {size:,} bytes, above the limit of {self._limit:,}")
            end = form.header_bytes + size
            if len(self._buffer) < end + form.trailer_bytes:
                return
            with memoryview(self._buffer) as view:
                body, trailer = bytes(view[form.header_bytes : end]), bytes(view[end : end + form.trailer_bytes])
            if not form.check(memoryview(body), trailer):
                return self._break("received a message without a valid signature")
            self._messages.append(body)
            del self._buffer[: end + form.trailer_bytes]

    def _break(self, problem: str) -> None:
        self._end = FrameError(problem)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # so that a selector reports the socket until the error is raised
