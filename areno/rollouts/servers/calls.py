"""The interface of the HTTP calls that a rollout replica makes to an inference server (vLLM or SGLang)."""

import math
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from areno.errors import EngineError
from areno.types import RolloutSequence, SamplingParams

SERVED_NAME = "policy"
"""Model name in requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A request for one answer. ``rid`` is the id with which the request can be aborted."""

    rid: str
    prompt: list[int]
    sampling: SamplingParams
    seed: int
    adapter: str = ""  # adapter to use; empty: the model itself


@dataclass(slots=True)
class ServerAnswer:
    """A server's answer.

    ``tokens``, ``logprobs`` and ``versions`` (the weight versions) have one entry per token. ``top`` also has one entry per
    token, or is empty if no top log-probs were requested. Raises EngineError if a token lacks a log-prob or a version.
    """

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    top: list[list[tuple[int, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.versions):
            counts = f"{len(self.logprobs)} log-probs and {len(self.versions)} weight versions"
            raise EngineError(f"the server returned {len(self.tokens)} tokens, but {counts}")

    def sequence(self, sampling: SamplingParams, text: str) -> RolloutSequence:
        """Convert the answer to a :class:`RolloutSequence`."""
        reason: Any = self.finish_reason if self.finish_reason in ("stop", "length") else "abort"
        return RolloutSequence(
            self.tokens,
            self.logprobs,
            reason,
            text,
            self.versions,
            top_logprobs=self.top,
            temperature=sampling.logprob_temperature,
            cut_mass=math.nan,  # servers do not report it
        )


class ServerCalls(Protocol):
    """The HTTP calls to a vLLM or SGLang server. A call raises EngineError if the server rejects the call or is unreachable."""

    product: str

    async def describe(self, http: httpx.AsyncClient) -> int:
        """Return the context length. areno calls this method first, as soon as the server is healthy."""

    async def generate(self, http: httpx.AsyncClient, sample: SampleRequest) -> ServerAnswer:
        """Generate one answer, with the log-prob and weight version of each token."""

    async def abort(self, http: httpx.AsyncClient, rids: list[str]) -> None:
        """Abort the samples ``rids``, so that ``generate`` returns partial answers.

        If such a sample is still in the server's queue, the server may start the sample nevertheless.
        """

    async def load_weights(self, http: httpx.AsyncClient, folder: Path, version: int) -> None:
        """Pause generation, load a checkpoint, and resume. Caches that were computed with the old weights are discarded."""

    async def load_adapter(self, http: httpx.AsyncClient, name: str, folder: Path) -> None:
        """Load an adapter under a name."""

    async def unload_adapter(self, http: httpx.AsyncClient, name: str) -> None:
        """Unload an adapter. Running requests that use the adapter finish normally; the server rejects new requests for it."""

    async def logprobs(self, http: httpx.AsyncClient, prompt: list[int]) -> list[float]:
        """Return the log-probs of the prompt tokens at temperature 1. The first token has no log-prob and no entry."""


def versions_of(spans: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the weight version of each token. Each span has a ``version``, and the token indices ``start`` and ``end``."""
    return [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]


def sampling_of(sampling: SamplingParams) -> dict[str, Any]:
    """Return those ``sampling_params`` of a request that have the same names in vLLM and SGLang."""
    names = ("top_p", "top_k", "min_p", "ignore_eos", "skip_special_tokens")
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    chosen = {name: getattr(sampling, name) for name in (*names, *penalties)}
    chosen["temperature"] = 0.0 if sampling.greedy else sampling.temperature
    chosen["stop_token_ids"] = sampling.stop_token_ids or []
    if sampling.stop:
        chosen["stop"] = sampling.stop
    if sampling.logit_bias:
        chosen["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    return chosen


async def post_json(http: httpx.AsyncClient, path: str, body: Any = None, **parameters: Any) -> Any:
    """Send a POST request, and return the JSON of the response. If the response is not JSON, return None.

    Raises EngineError if the server rejects the request or is unreachable.
    """
    return await _answered(http, path, http.post(path, json={} if body is None else body, params=parameters))


async def get_json(http: httpx.AsyncClient, path: str) -> Any:
    """Send a GET request, and return the JSON of the response. Retries once if the server closed the connection."""
    return await _answered(http, path, _got(http, path))


async def _got(http: httpx.AsyncClient, path: str) -> httpx.Response:
    try:
        return await http.get(path)
    except (httpx.ReadError, httpx.RemoteProtocolError):
        return await http.get(path)


async def _answered(http: httpx.AsyncClient, path: str, call: Awaitable[httpx.Response]) -> Any:
    try:
        answer = await call
    except httpx.HTTPError as error:
        raise EngineError(f"the request to {http.base_url}{path} failed: {type(error).__name__}: {error}") from error
    if answer.status_code >= 300:
        raise EngineError(
            f"the request to {http.base_url}{path} failed with status {answer.status_code}: {_reason(answer)}"
        )
    return answer.json() if answer.headers.get("content-type", "").startswith("application/json") else None


def _reason(answer: httpx.Response) -> str:
    try:
        body = answer.json()
        return str(body.get("error", body).get("message", body))[:500]
    except (ValueError, AttributeError):
        return answer.text[:500]
