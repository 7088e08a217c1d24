"""Messages between two processes over a socket: whole, of limited size, and never waited for without a deadline.

A frame is a header with the length of the body, and the body. On a socket pair the header begins with the connection's
key, which the starting side draws and sends first: bytes that something else writes into the socket lack it, so they are an
error at once instead of a length to wait for. Between machines header and body are signed, see :class:`SignedFormat`.
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
    """What has arrived is not a message of the other side."""


class KeyedFormat:
    """A frame begins with a key; it ends with its body. What the methods mean is said at :class:`SignedFormat`."""

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
    """Header and body are signed with a key that only the two ends know, each with its place in the stream.

    So nobody between the two can change, repeat, leave out or add a message, or send one back to its sender.

    Args:
        key: of the connection.
        dials: this end has opened the connection, which tells the directions apart.
    """

    header_bytes, trailer_bytes = _LENGTH.size + _MAC_BYTES, _MAC_BYTES

    def __init__(self, key: bytes, dials: bool) -> None:
        self._keys = [hashlib.blake2b(end, key=key).digest() for end in (b"dials", b"answers")]
        if not dials:
            self._keys.reverse()
        self._sent = self._received = 0

    def begins(self, start: bytes) -> bool:
        """Whether a header may begin so, as far as that can be told."""
        return True

    def written(self, body: bytes) -> tuple[bytes, bytes]:
        """Header and trailer of the next frame."""
        length = _LENGTH.pack(len(body))
        made = length + self._mac(0, self._sent, b"h", length), self._mac(0, self._sent, b"b", body)
        self._sent += 1
        return made

    def length(self, header: bytes) -> int | None:
        """Length of the next frame's body, by its header; None if that is none."""
        length, mac = header[: _LENGTH.size], header[_LENGTH.size :]
        if not hmac.compare_digest(mac, self._mac(1, self._received, b"h", length)):
            return None
        size: int = _LENGTH.unpack(length)[0]
        return size

    def check(self, body: memoryview, trailer: bytes) -> bool:
        """Whether the next frame is what the other end has sent."""
        right = hmac.compare_digest(trailer, self._mac(1, self._received, b"b", body))
        self._received += 1
        return right

    def _mac(self, end: int, place: int, part: bytes, content: bytes | memoryview) -> bytes:
        made = hashlib.blake2b(part + _LENGTH.pack(place), key=self._keys[end], digest_size=_MAC_BYTES)
        made.update(content)
        return made.digest()


class Frames:
    """One end of a connection; bodies of more than ``limit`` bytes are refused.

    One thread at a time may read from it, and one may write to it.
    """

    def __init__(self, sock: socket.socket, form: KeyedFormat | SignedFormat, limit: int) -> None:
        sock.setblocking(False)
        self._socket, self._form, self._limit = sock, form, limit
        self._buffer = bytearray()
        self._whole: deque[bytes] = deque()
        self._end: Exception | None = None

    @classmethod
    def pair(cls, limit: int) -> tuple[Frames, socket.socket]:
        """One end for this process, and the socket that another one hands to :meth:`join`."""
        ours, theirs = socket.socketpair()
        return cls.lead(ours, limit), theirs

    @classmethod
    def lead(cls, sock: socket.socket, limit: int) -> Frames:
        """The end of the starting side."""
        key = secrets.token_bytes(_KEY_BYTES)
        with suppress(OSError):  # if the other side is gone already, the first read says so
            sock.sendall(key)
        return cls(sock, KeyedFormat(key), limit)

    @classmethod
    def follow(cls, sock: socket.socket) -> Frames:
        """The other end, which trusts the starting side."""
        return cls(sock, KeyedFormat(sock.recv(_KEY_BYTES, socket.MSG_WAITALL)), sys.maxsize)

    @classmethod
    def join(cls, file: int) -> Frames:
        """The other end, from its file descriptor."""
        return cls.follow(socket.socket(fileno=file))

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
        form = self._form
        while self._buffer:
            begin = bytes(self._buffer[: form.header_bytes])
            if not form.begins(begin):
                return self._break("something that is no message was written to the connection")
            if len(begin) < form.header_bytes:
                return
            size = form.length(begin)
            if size is None:
                return self._break("a message has arrived that the other side has not signed")
            if size > self._limit:
                return self._break(f"a message of {size:,} bytes was announced, the limit is {self._limit:,}")
            end = form.header_bytes + size
            if len(self._buffer) < end + form.trailer_bytes:
                return
            with memoryview(self._buffer) as whole:
                body, trailer = bytes(whole[form.header_bytes : end]), bytes(whole[end : end + form.trailer_bytes])
            if not form.check(memoryview(body), trailer):
                return self._break("a message has arrived that the other side has not signed")
            self._whole.append(body)
            del self._buffer[: end + form.trailer_bytes]

    def _break(self, problem: str) -> None:
        self._end = FrameError(problem)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # so that a selector reports it again, until it has been raised
