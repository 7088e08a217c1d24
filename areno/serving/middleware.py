"""The middleware of every request: checks the API key, limits the size of the body, and adds a request id.

On a loopback server without an API key, the middleware checks the ``Host`` header instead. The middleware also records metrics,
and converts errors to responses.
"""

import secrets
import time
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areno.config.serve_options import is_loopback
from areno.observability.session_tracer import in_session
from areno.serving.errors import ApiError, unexpected
from areno.serving.recording import KEY_PREFIX, SessionRecorder
from areno.serving.service import Service

# Paths that need no key, for the health checks of load balancers.
_OPEN_PATHS = ("/health", "/ready", "/live")

SESSION_RECORDER = "areno.session_recorder"
"""Key under which the ASGI scope holds the session recorder of a request. Only a server with a recorder sets this key."""


class RequestMiddleware:
    """ASGI middleware for authentication, limits, metrics and errors."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection. Check the API key, the host and the body size of HTTP requests.

        Pass all other connections to the application without checks.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sender = _ResponseSender(send)
        start = time.perf_counter()
        try:
            await self._checked(scope, _limited(receive, self._service.config.max_body_bytes), sender)
        except ApiError as error:
            await sender.error(error, scope, receive)
        except Exception as error:
            await sender.error(unexpected(error), scope, receive)
        finally:
            # The route's path, not the client's: otherwise clients could create unlimited label values.
            endpoint = getattr(scope.get("route"), "path", "other")
            self._service.metrics.requests.labels(endpoint, str(sender.status)).inc()
            if endpoint.startswith("/v1/") and scope["method"] == "POST":
                self._service.metrics.request_seconds.observe(time.perf_counter() - start)

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if not self._authenticate(scope, headers):
            message = "the API key is missing or invalid; send the header `Authorization: Bearer KEY`"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        self._check_host(scope, headers.get(b"host", b""))
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._service.config.max_body_bytes:
            raise _too_large(self._service.config.max_body_bytes)
        recorder: SessionRecorder | None = scope.get(SESSION_RECORDER)
        with in_session(None if recorder is None else recorder.session):
            await self._app(scope, receive, send)

    def _authenticate(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        """Whether the key is valid, or no key is needed. If the server records conversations, the :class:`SessionRecorder` of
        the key is stored in ``scope[SESSION_RECORDER]``."""
        recorder, key = self._service.recorder, self._service.config.api_key
        client_key = _key_in_path(scope) if recorder is not None else b""
        client_key = client_key or key_in_headers(headers)
        if scope["path"] in _OPEN_PATHS:
            return True
        if recorder is not None:
            scope[SESSION_RECORDER] = recorder.of_key(client_key.decode(errors="replace"))
            return scope[SESSION_RECORDER] is not None
        # Compare in constant time, so that the key cannot be guessed byte by byte.
        return key is None or secrets.compare_digest(client_key, key.encode())

    def _check_host(self, scope: Scope, header: bytes) -> None:
        """If a loopback server requires no API key, reject foreign ``Host`` headers, as a protection against DNS rebinding.

        A foreign web page can reach the server if the domain of the page resolves to 127.0.0.1. The requests of this page
        have this domain in the ``Host`` header.
        """
        config, server = self._service.config, scope.get("server")
        keyless = self._service.recorder is None and config.api_key is None
        if not (header and keyless and server and is_loopback(server[0])) or scope["path"] in _OPEN_PATHS:
            return
        host = host_name(header)
        if is_loopback(host) or host.endswith(".localhost") or {host, "*"} & set(config.allowed_hosts):
            return
        message = (
            f"the host {host!r} is not allowed; use http://127.0.0.1:{server[1]}, or start the server with "
            f"--allowed-host {host} or --api-key"
        )
        raise ApiError(403, message, code="host_not_allowed")


def host_name(header: bytes) -> str:
    """Return the host in a ``Host`` header, without the port."""
    host = header.decode("latin-1").strip().lower()
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].removesuffix(".")


def key_in_headers(headers: dict[bytes, bytes]) -> bytes:
    """Return the API key from the header ``Authorization`` (used by OpenAI clients) or ``x-api-key`` (used by Anthropic
    clients). Empty if neither header contains a key."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


def _key_in_path(scope: Scope) -> bytes:
    """Remove and return the key in the path ``/samples/KEY/v1/...``. Programs that accept only a base URL use this path."""
    if not scope["path"].startswith(KEY_PREFIX):
        return b""
    key, _, rest = scope["path"].removeprefix(KEY_PREFIX).partition("/")
    scope["path"] = f"/{rest}"
    scope["raw_path"] = scope["path"].encode()
    return str(key).encode()


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes; send a smaller body", code="body_too_large")


def _limited(receive: Receive, limit: int) -> Receive:
    """Wrap ``receive`` to reject a request as soon as its body is too large. Needed for requests without a content length."""
    size = 0

    async def read() -> Message:
        nonlocal size
        message = await receive()
        if message["type"] == "http.request":
            size += len(message.get("body", b""))
            if size > limit:
                raise _too_large(limit)
        return message

    return read


class _ResponseSender:
    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", uuid.uuid4().hex.encode())]
        await self._send(message)

    async def error(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        if not self.status:
            await error.response()(scope, receive, self)
