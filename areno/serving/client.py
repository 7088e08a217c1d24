"""A small client for chat completions, with the standard library alone: streams an answer piece by piece."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from areno.errors import ArenoError, UsageError

_CONNECT = "start a server with `areno serve`, or check --base-url"


class ChatClient:
    """Talks to one OpenAI-compatible server; without an ``api_key`` none is sent."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self._base = base_url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def first_model(self) -> str:
        """Name of the first model that the server lists. Raises ArenoError: it cannot be asked, or has none."""
        with self._open("/models") as answer:
            models = json.load(answer).get("data") or []
        if not models:
            raise ArenoError(f"{self._base} serves no model; name one with --model")
        return str(models[0]["id"])

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The deltas of one answer, as they come. Raises ArenoError: the server refuses, fails, or goes away."""
        with self._open("/chat/completions", body | {"stream": True}) as answer:
            for line in answer:
                data = line.decode().strip().removeprefix("data:").strip()
                if not line.startswith(b"data:") or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ArenoError(f"{self._base}: {chunk['error'].get('message', data)}")
                for choice in chunk.get("choices") or []:
                    yield choice.get("delta") or {}

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, self._headers)
        try:
            return urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            raise ArenoError(f"{self._base}{path}: status {error.code}: {_message(error)}") from error
        except urllib.error.URLError as error:
            raise UsageError(f"--base-url {self._base} cannot be reached: {error.reason}; {_CONNECT}") from error


def _message(error: urllib.error.HTTPError) -> str:
    text = error.read().decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200] or str(error.reason)
