"""A client of servers of the OpenAI protocol: teachers, judges, and models to be measured, by address."""

import os
import time
from typing import Any

import httpx

from areno.errors import ArenoError, UsageError

# Busy, or restarting behind a proxy.
_PASSING = (429, 502, 503, 504)
_WAITS_S = (0.5, 1.0, 2.0, 4.0)
_SHOWN = 500


class ServerError(ArenoError):
    """A server does not answer, refuses, or answers something else than the protocol has."""


class OpenAIClient:
    """One server; its threads may share a client.

    Args:
        url: with its version, such as ``http://HOST:8000/v1``.
        timeout_s: of one request.
        model: name at the server; None takes the first that it lists.

    The key is taken from ``OPENAI_API_KEY``. It connects at the first request, so it
    may be made in one process and used in another.
    """

    def __init__(self, url: str, timeout_s: float, model: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._timeout_s, self._model = timeout_s, model
        self._http: httpx.Client | None = None

    def model(self) -> str:
        """What the model is called there. Raises ServerError."""
        if self._model is None:
            try:
                found = self._connected().get(f"{self.url}/models")
                found.raise_for_status()
                self._model = str(found.json()["data"][0]["id"])
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                raise ServerError(f"{type(error).__name__}: {error}") from error
        return self._model

    def check(self, named: str) -> None:
        """Look whether a server is there, which ``named`` says to the user. Raises UsageError: it is not."""
        try:
            self.model()
        except ServerError as error:
            raise UsageError(
                f"{named}: no server of the OpenAI protocol answers there ({error}); start it, correct the address, or name a "
                "model folder"
            ) from error

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to a request of the model; one that fails for a passing reason is sent again for some seconds.

        Raises ServerError: nobody answers, or the server refuses.
        """
        request = {"model": self.model(), **body}
        for wait_s in (*_WAITS_S, None):
            try:
                answer = self._connected().post(f"{self.url}/{path}", json=request)
            except httpx.TimeoutException as error:
                raise ServerError(f"{type(error).__name__}: no answer in {self._timeout_s:g} s") from error
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if answer.is_success:
                    return _json(answer)
                problem = f"status {answer.status_code}: {answer.text[:_SHOWN]}"
                if answer.status_code not in _PASSING:
                    break
            if wait_s is not None:
                time.sleep(wait_s)
        raise ServerError(problem)

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


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError as error:
        raise ServerError(f"no JSON: {answer.text[:_SHOWN]!r}") from error
