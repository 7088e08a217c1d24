"""Controls access to ``areno view``: checks the API key and the host name, and adds security headers.

The security headers forbid the page to load files from other servers.
"""

import secrets

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areno.config.serve_options import is_loopback
from areno.serving.errors import ApiError, unexpected
from areno.serving.middleware import host_name, key_in_headers

_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
LOGIN = "/api/login"
_MAX_KEY_BYTES = 4096
_OWN_PAGES = (b"none", b"same-origin")
"""Allowed values of ``Sec-Fetch-Site``.

A browser sends ``none`` for a typed address, and ``same-origin`` for a request from the page itself.
"""


class AccessMiddleware:
    """ASGI middleware that rejects unauthorized requests for data, and adds security headers to responses.

    If the server has no API key, a request is rejected unless its Host header contains a loopback address or ``localhost``. A
    browser sends the API key only once, in a POST request to ``/api/login``, and receives a cookie, which is valid until the
    server stops.
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app, self._key, self._session = app, key, secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                names = {name for name, _ in message["headers"]}
                added = {"cache-control": "no-store", **_HEADERS}
                more = [(name.encode(), value.encode()) for name, value in added.items() if name.encode() not in names]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        try:
            response = await self._refusal_or_login(scope, receive)
            await (response or self._app)(scope, receive, with_headers)
        except ApiError as error:
            await error.response()(scope, receive, with_headers)
        except Exception as error:
            if started:
                raise
            await unexpected(error).response()(scope, receive, with_headers)

    async def _refusal_or_login(self, scope: Scope, receive: Receive) -> Response | None:
        headers = dict(scope["headers"])
        self._check_host(scope, headers.get(b"host", b""))
        if not scope["path"].startswith("/api/"):
            return None  # the page itself holds no data
        if headers.get(b"sec-fetch-site", b"none") not in _OWN_PAGES:
            raise ApiError(
                403,
                "pages from other servers cannot use this server; open this server's address in the browser",
                code="cross_site",
            )
        if self._key is None:
            return None
        if scope["path"] == LOGIN and scope["method"] == "POST":
            return await self._login(Request(scope, receive))
        if not self._has_key(scope, headers):
            raise ApiError(
                401, "the API key is missing or wrong; send the API key of this server", code="invalid_api_key"
            )
        return None

    def _has_key(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        sent = key_in_headers(headers)
        if sent:
            return self._matches(sent)
        cookie = Request(scope).cookies.get(_cookie_name(scope), "")  # tolerates odd cookies of other programs
        return secrets.compare_digest(cookie.encode(), self._session.encode())

    def _matches(self, key: bytes) -> bool:
        """Whether ``key`` is the API key. The comparison takes constant time, so that its duration reveals nothing."""
        return secrets.compare_digest(key, (self._key or "").encode())

    async def _login(self, request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _MAX_KEY_BYTES:
                raise ApiError(
                    413, f"the API key is longer than {_MAX_KEY_BYTES} bytes; send the API key of this server"
                )
        if not self._matches(body.strip()):
            raise ApiError(401, "this is not the API key of the server", code="invalid_api_key")
        response = JSONResponse({"status": "ok"})
        response.set_cookie(_cookie_name(request.scope), self._session, httponly=True, samesite="strict")
        return response

    def _check_host(self, scope: Scope, header: bytes) -> None:
        """If the server has no API key, reject a Host header that is neither a loopback address nor ``localhost``.

        Any other host name may come from a DNS rebinding attack.
        """
        host = host_name(header)
        if self._key is not None or is_loopback(host) or host.endswith(".localhost"):
            return
        port = (scope.get("server") or ("", ""))[1]
        message = f"the host {host!r} is not allowed; use http://127.0.0.1:{port}, or start areno view with --api-key"
        raise ApiError(403, message, code="host_not_allowed")


def _cookie_name(scope: Scope) -> str:
    """Return the name of the session cookie. The name contains the port, because all ports of a host share cookies."""
    port = dict(scope["headers"]).get(b"host", b"").rpartition(b":")[2]
    return f"areno_view_{port.decode() if port.isdigit() else ''}"
