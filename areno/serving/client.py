"""A minimal streaming client for chat completions, based on ``urllib``."""

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from areno.errors import ArenoError, UsageError

_TIMEOUT_S = 600.0
"""Longest time in seconds without data from the server."""
_CONNECT = "start a server with `areno serve`, or check --base-url"


class ChatClient:
    """A client of an OpenAI-compatible server. If ``api_key`` is set, it is sent as a bearer token."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self._base = base_url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def first_model(self) -> str:
        """Return the name of the server's first model. Raises ArenoError if the server is unreachable or lists no models."""
        with self._open("/models") as response:
            models = self._parsed(b"".join(self._lines(response))).get("data") or []
        if not models:
            raise ArenoError(f"the server at {self._base} lists no models; select a model with --model")
        return str(models[0]["id"])

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the deltas of one response as they arrive. Raises ArenoError if the request fails."""
        with self._open("/chat/completions", body | {"stream": True}) as response:
            for line in self._lines(response):
                data = line.decode().strip().removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                if not line.startswith(b"data:"):
                    continue
                chunk = self._parsed(data)
                if "error" in chunk:
                    error = chunk["error"]
                    raise ArenoError(
                        f"{self._base} reported an error: {error.get('message', data) if isinstance(error, dict) else error}"
                    )
                for choice in chunk.get("choices") or []:
                    yield choice.get("delta") or {}
        raise ArenoError(f"the connection to {self._base} ended during the answer")

    def _parsed(self, data: str | bytes) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            if isinstance(parsed := json.loads(data), dict):
                return parsed
        raise ArenoError(f"{self._base} did not answer with a JSON object: {data[:100]!r}; check --base-url")

    def _lines(self, response: Any) -> Iterator[bytes]:
        try:
            yield from response
        except (OSError, http.client.HTTPException) as error:
            raise ArenoError(f"the connection to {self._base} ended during the answer: {error!r}") from error

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise ArenoError(f"{self._base}{path} returned status {error.code}: {_message(error)}") from error
        except urllib.error.URLError as error:
            raise UsageError(f"--base-url {self._base} is unreachable: {error.reason}; {_CONNECT}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ArenoError(f"the server did not answer a request to {self._base}{path}: {error!r}") from error


def _message(error: urllib.error.HTTPError) -> str:
    text = error.read().decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200] or str(error.reason)
