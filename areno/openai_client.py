"""Client of OpenAI-compatible servers, for teachers, judges and models under evaluation."""

import os
import time
from typing import Any

import httpx

from areno.errors import ArenoError, UsageError

_RETRIED = (429, 502, 503, 504)  # busy, or restarting behind a proxy
_NO_LIST = (404, 405, 501)  # statuses of servers that do not list their models
_WAITS_S = (0.5, 1.0, 2.0, 4.0)
_MAX_SHOWN = 500


class ServerError(ArenoError):
    """A server does not answer, returns an error, or violates the protocol."""


class OpenAIClient:
    """A thread-safe client of one server.

    If the environment variable ``OPENAI_API_KEY`` is set, the client sends this key. The client connects at its first
    request, so a client may be created in one process and used in another process.

    Args:
        url: base URL with the API version, such as ``http://HOST:8000/v1``.
        timeout_s: timeout of one request in seconds.
        model: model name on the server. None selects the first model that the server lists.
    """

    def __init__(self, url: str, timeout_s: float, model: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._timeout_s, self._model = timeout_s, model
        self._http: httpx.Client | None = None

    def model(self) -> str:
        """Return the model's name. If the name is not known yet, it is requested from the server.

        Raises ServerError if this request fails.
        """
        if self._model is None:
            self._model = self._listed()
        return self._model

    def check(self, description: str) -> None:
        """Raise UsageError if a request for the server's list of models fails. The message starts with ``description``.

        If the client was created with a model name, a server that offers no such list (status 404, 405 or 501) passes the
        check.
        """
        try:
            listed = self._listed()
            self._model = self._model or listed
        except ServerError as error:
            cause = error.__cause__
            lists_none = isinstance(cause, httpx.HTTPStatusError) and cause.response.status_code in _NO_LIST
            if self._model is not None and lists_none:
                return
            raise UsageError(
                f"{description}: no OpenAI-compatible server answers ({error}); start the server, correct the address, or "
                "pass a model folder"
            ) from error

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send a request to the model and return the JSON response.

        Transient failures are retried, but timeouts are not. Raises ServerError if the server does not answer, returns
        an error, or returns invalid JSON.
        """
        request = {"model": self.model(), **body}
        for wait_s in (*_WAITS_S, None):
            try:
                response = self._connected().post(f"{self.url}/{path}", json=request)
            except httpx.TimeoutException as error:
                raise ServerError(f"{type(error).__name__}: no answer in {self._timeout_s:g} s") from error
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if response.is_success:
                    return _json(response)
                problem = f"status {response.status_code}: {response.text[:_MAX_SHOWN]}"
                if response.status_code not in _RETRIED:
                    break
            if wait_s is not None:
                time.sleep(wait_s)
        raise ServerError(problem)

    def _listed(self) -> str:
        try:
            response = self._connected().get(f"{self.url}/models")
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise ServerError(f"{type(error).__name__}: {error}") from error

    def _connected(self) -> httpx.Client:
        if self._http is None:
            key = os.environ.get("OPENAI_API_KEY", "")
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            self._http = httpx.Client(
                headers=headers,
                timeout=self._timeout_s,
                trust_env=False,
                limits=httpx.Limits(max_connections=None),
            )
        return self._http


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise ServerError(f"response is not JSON: {response.text[:_MAX_SHOWN]!r}") from error
