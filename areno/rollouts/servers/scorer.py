"""A frozen model behind an address: any server of the OpenAI protocol that gives prompts their log-probs.

That is ``/v1/completions`` with a prompt of token ids, ``echo`` and ``logprobs``, as vLLM and SGLang have it. The model must
have the vocabulary of the policy, which is not checked.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from areno.errors import EngineError, UsageError

_AT_ONCE = 32
_ERRORS = 400


class ServerScorer:
    """Scores rows of token ids.

    Args:
        url: with its version, such as ``http://HOST:8000/v1``.
        option: what names it in messages.
        timeout_s: of one row.

    The key is taken from ``OPENAI_API_KEY``. Raises UsageError: nobody answers there.
    """

    def __init__(self, url: str, option: str, timeout_s: float) -> None:
        self.url, self._option = url.rstrip("/"), option
        key = os.environ.get("OPENAI_API_KEY", "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(headers=headers, timeout=timeout_s, trust_env=False)
        try:
            found = self._http.get(f"{self.url}/models")
            found.raise_for_status()
            self._model: str = found.json()["data"][0]["id"]
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            raise UsageError(
                f"{option}={url}: no server of the OpenAI protocol answers there ({type(error).__name__}: {error}); start it, "
                "correct the address, or name a model folder"
            ) from error

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob of each token of each row given the tokens before it, at temperature 1; entry 0 is 0.0.

        Raises EngineError: the server has refused, is gone, or gives prompts no log-probs.
        """
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="areno-teacher") as pool:
            return list(pool.map(self._row, rows))

    def _row(self, tokens: Sequence[int]) -> list[float]:
        body = {
            "model": self._model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 1,
            "echo": True,
            "logprobs": 1,
        }
        try:
            answer = self._http.post(f"{self.url}/completions", json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"{self._option}={self.url} does not answer: {type(error).__name__}: {error}") from error
        if answer.status_code >= _ERRORS:
            raise EngineError(f"{self._option}={self.url} refuses a row of {len(tokens)} tokens: {answer.text[:500]}")
        try:
            given: Any = (answer.json()["choices"][0].get("logprobs") or {}).get("token_logprobs") or []
        except (ValueError, LookupError, AttributeError, TypeError):
            given = []
        scores = given[: len(tokens)]
        if len(scores) < len(tokens) or any(score is None for score in scores[1:]):
            raise EngineError(
                f"{self._option}={self.url} gives prompts no log-probs (echo with logprobs); vLLM and SGLang do"
            )
        return [0.0, *(float(score) for score in scores[1:])]
