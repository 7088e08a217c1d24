"""Enforces limits before authentication: open connections, header size, and the time until headers and body arrive."""

import asyncio
import json
from typing import Any, Literal

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from areno.serving.errors import ApiError

MAX_HEAD_BYTES = 64 * 2**10
HEAD_TIMEOUT_S = 30.0
BODY_TIMEOUT_S = 120.0
# Extra time in which a busy event loop can read data that arrived in time, before the connection is closed.
_GRACE_S = 0.1


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits. With ``max_connections=None``, connections are unlimited."""

    def __init__(self, max_connections: int | None, **options: Any) -> None:
        super().__init__(**options)
        self._max_connections = max_connections
        self._awaited: Literal["headers", "body"] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._unparsed = 0  # bytes received since the head began, while it is incomplete
        self._head = 0  # bytes of the head parsed so far
        self._refusal: ApiError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Reject the connection if there are too many connections. Otherwise wait for a request."""
        super().connection_made(transport)
        if self._max_connections is not None and len(self.connections) > self._max_connections:
            message = f"the server has too many open connections (limit: {self._max_connections}); retry later"
            self._refuse(ApiError(503, message, code="too_many_connections", headers={"Retry-After": "1"}))
        else:
            self._await("headers")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of the connection."""
        self._await(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data, and limit the size of incomplete headers."""
        in_head = self._awaited == "headers" and self._head > 0
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._awaited == "headers" and (in_head or self._unparsed):
            self._unparsed += len(data)
            if self._unparsed > MAX_HEAD_BYTES:
                self._refuse(_large_head())
        elif self._awaited is None and (self.cycle is None or self.cycle.response_complete):
            self._await("headers")  # stray bytes must not keep a connection open

    def on_message_begin(self) -> None:
        """Start counting the bytes of the headers."""
        super().on_message_begin()
        self._head, self._unparsed = 1, 0
        if self._awaited is None:
            self._await("headers")

    def on_url(self, url: bytes) -> None:
        """Count the bytes of the URL, which may arrive in several parts."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the bytes of a header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Wait for the body."""
        super().on_headers_complete()
        self._head = self._unparsed = 0
        self._await("body")

    def on_message_complete(self) -> None:
        """Stop the timer, because the request has arrived."""
        super().on_message_complete()
        self._await(None)

    def send_400_response(self, msg: str) -> None:
        """Reject a request that cannot be parsed."""
        self._refuse(self._refusal or ApiError(400, msg))

    def _count(self, length: int) -> None:
        self._head += length
        if self._head > MAX_HEAD_BYTES:
            self._refusal = _large_head()
            raise self._refusal  # stops the parser

    def _await(self, what: Literal["headers", "body"] | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._awaited, self._deadline = what, None
        if what is not None:
            seconds = HEAD_TIMEOUT_S if what == "headers" else BODY_TIMEOUT_S
            self._deadline = self.loop.call_later(seconds, self._overdue)

    def _overdue(self) -> None:
        self._deadline = self.loop.call_later(_GRACE_S, self._give_up)

    def _give_up(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if self._awaited == "headers" and answering:  # the response to the previous request is not complete
            self._await("headers")
        elif self._awaited == "body" and answering and self.cycle.response_started:
            self.transport.close()
        else:
            self._refuse(ApiError(408, f"the {self._awaited} of the request did not arrive in time", code="timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Send an error response without calling the application, and close the connection."""
        self._await(None)
        body = json.dumps(error.body).encode()
        lines = [f"{name}: {value}" for name, value in (error.headers or {}).items()]
        head = [f"HTTP/1.1 {error.status} Refused", "content-type: application/json", f"content-length: {len(body)}"]
        self.transport.write("\r\n".join([*head, *lines, "connection: close", "", ""]).encode() + body)
        self.transport.close()


def _large_head() -> ApiError:
    return ApiError(
        431, f"the headers are larger than {MAX_HEAD_BYTES} bytes; send smaller headers", code="headers_too_large"
    )
