"""Around every request: the API key or the host's name, the limit of the body, a request id, the counters, and the last
net for errors."""

import secrets
import time
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areno.config.serve_options import is_loopback
from areno.observability.session_tracer import in_session
from areno.serving.errors import ApiError, unexpected
from areno.serving.recording import KEY_PREFIX, Tape
from areno.serving.service import Service

# What a load balancer asks; it has no key, and learns nothing but whether to send requests here.
_OPEN_PATHS = ("/health", "/ready", "/live")

TAPE = "areno.tape"
"""Key of the ASGI scope under which a recorder's tape of the request stands."""


class Guard:
    """ASGI middleware; see the module's text."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        watched = _Sending(send)
        began = time.perf_counter()
        try:
            await self._guarded(scope, _limited(receive, self._service.config.max_body_bytes), watched)
        except ApiError as error:
            await watched.error(error, scope, receive)
        except Exception as error:
            await watched.error(unexpected(error), scope, receive)
        finally:
            # The route's own path, never the client's: otherwise anybody could make endless label values.
            endpoint = getattr(scope.get("route"), "path", "other")
            self._service.metrics.requests.labels(endpoint, str(watched.status)).inc()
            if endpoint.startswith("/v1/") and scope["method"] == "POST":
                self._service.metrics.request_seconds.observe(time.perf_counter() - began)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if not self._may_enter(scope, headers):
            message = "the API key is missing or wrong; send the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        self._check_host(scope, headers.get(b"host", b""))
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._service.config.max_body_bytes:
            raise _too_large(self._service.config.max_body_bytes)
        tape: Tape | None = scope.get(TAPE)
        with in_session(None if tape is None else tape.session):
            await self._app(scope, receive, send)

    def _may_enter(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        """Whether the key is right; with a recorder, ``scope[TAPE]`` is the tape that it stands for."""
        recorder, key = self._service.recorder, self._service.config.api_key
        given = _key_in_path(scope) if recorder is not None else b""
        given = given or _given_key(headers)
        if scope["path"] in _OPEN_PATHS:
            return True
        if recorder is not None:
            scope[TAPE] = recorder.tape(given.decode(errors="replace"))
            return scope[TAPE] is not None
        # compare_digest takes the same time wherever the difference is, so the key cannot be guessed byte by byte.
        return key is None or secrets.compare_digest(given, key.encode())

    def _check_host(self, scope: Scope, header: bytes) -> None:
        """Without a key, being on this machine is what lets a client in, and a web page can be made to seem so.

        A page whose name is made to stand for 127.0.0.1 (DNS rebinding) still sends that name.
        """
        config, server = self._service.config, scope.get("server")
        keyless = self._service.recorder is None and config.api_key is None
        if not (header and keyless and server and is_loopback(server[0])) or scope["path"] in _OPEN_PATHS:
            return
        host = _host_name(header)
        if is_loopback(host) or host.endswith(".localhost") or {host, "*"} & set(config.allowed_hosts):
            return
        message = (
            f"the host {host!r} is not this machine's; ask http://127.0.0.1:{server[1]}, or start the server with "
            f"--allowed-host {host}, or with --api-key"
        )
        raise ApiError(403, message, code="host_not_allowed")


def _host_name(header: bytes) -> str:
    """The host of a ``Host`` header, without its port."""
    host = header.decode("latin-1").strip().lower()
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].removesuffix(".")


def _given_key(headers: dict[bytes, bytes]) -> bytes:
    """The key as OpenAI clients send it, or as Anthropic's do."""
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


def _key_in_path(scope: Scope) -> bytes:
    """The key in ``/samples/KEY/v1/...``, for programs that can be given nothing but a base URL; cuts it off the path."""
    if not scope["path"].startswith(KEY_PREFIX):
        return b""
    key, _, rest = scope["path"].removeprefix(KEY_PREFIX).partition("/")
    scope["path"] = f"/{rest}"
    scope["raw_path"] = scope["path"].encode()
    return str(key).encode()


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes; send less", code="body_too_large")


def _limited(receive: Receive, limit: int) -> Receive:
    """Stop reading a body beyond the limit, also one that does not say its length."""
    taken = 0

    async def read() -> Message:
        nonlocal taken
        message = await receive()
        if message["type"] == "http.request":
            taken += len(message.get("body", b""))
            if taken > limit:
                raise _too_large(limit)
        return message

    return read


class _Sending:
    """Passes messages on, notes the status, and gives every answer an id."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", uuid.uuid4().hex.encode())]
        await self._send(message)

    async def error(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """Answer with an error, unless an answer has begun."""
        if not self.status:
            await error.response()(scope, receive, self)
