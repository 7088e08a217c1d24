"""Scores rows with a frozen model on any OpenAI-compatible server that returns prompt log-probs.

A request sends token ids as the prompt to ``/v1/completions`` and sets ``echo`` and ``logprobs``. vLLM and SGLang support these
requests. The model must have the vocabulary of the policy, but areno does not check the vocabulary.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from areno.errors import EngineError, UsageError
from areno.openai_client import OpenAIClient, ServerError

_AT_ONCE = 32


class ServerScorer:
    """Asks an inference server for the log-prob of every token in rows of token ids.

    Args:
        url: base URL including the version, such as ``http://HOST:8000/v1``.
        option: name of the setting that holds ``url``, for error messages.
        timeout_s: time limit per row in seconds.

    The API key is read from the environment variable ``OPENAI_API_KEY``.

    Raises:
        UsageError: a request for the server's list of models fails.
    """

    def __init__(self, url: str, option: str, timeout_s: float) -> None:
        self._client, self._option = OpenAIClient(url, timeout_s), option
        self._client.check(f"{option}={url}")

    def __call__(self, rows: Sequence[Sequence[int]], temperatures: Sequence[float]) -> list[list[float]]:
        """Return the log-prob of each token of each row, given the previous tokens. The first entry of each row is 0.0.

        Raises:
            UsageError: a row was sampled at a temperature other than 1. Servers score rows only at temperature 1.
            EngineError: the server rejected the request, is unreachable, or returns no prompt log-probs.
        """
        if others := sorted({temperature for temperature in temperatures if temperature != 1}):
            raise UsageError(
                f"{self._option}={self._client.url}: a server scores only at temperature 1, but the workflow sampled at "
                f"temperature {others[0]:g}; sample at temperature 1, or set {self._option} to a model folder"
            )
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="areno-teacher") as pool:
            return list(pool.map(self._row, rows))

    def _row(self, tokens: Sequence[int]) -> list[float]:
        body = {"prompt": list(tokens), "max_tokens": 1, "temperature": 1, "echo": True, "logprobs": 1}
        where = f"{self._option}={self._client.url}"
        try:
            answer = self._client.post("completions", body)
        except ServerError as error:
            raise EngineError(f"{where} failed to score a row of {len(tokens)} tokens: {error}") from error
        try:
            logprobs: Any = (answer["choices"][0].get("logprobs") or {}).get("token_logprobs") or []
        except (LookupError, AttributeError, TypeError):
            logprobs = []
        scores = logprobs[: len(tokens)]
        if len(scores) < len(tokens) or any(score is None for score in scores[1:]):
            raise EngineError(
                f"{where} returns no log-probs of the prompt, although the request sets echo and logprobs; use a vLLM or "
                "SGLang server"
            )
        return [0.0, *(float(score) for score in scores[1:])]
