"""What a rollout replica asks of an inference server, whichever product it is."""

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import httpx

from areno.errors import EngineError
from areno.rollouts.fleet.tensors import TensorSpec
from areno.types import RolloutSequence, SamplingParams

SERVED_NAME = "policy"
"""What the model is called in requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server that is up: its limits, and the weights it has."""

    context_length: int
    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer that is asked for; ``rid`` names it when it is to be aborted."""

    rid: str
    prompt: list[int]
    sampling: SamplingParams
    seed: int
    adapter: str = ""  # name of the adapter that answers; empty is the model itself


@dataclass(slots=True)
class Answer:
    """What a server has answered, token by token. Raises EngineError: some tokens have no log-prob or no version."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    top: list[list[tuple[int, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.versions):
            counts = f"{len(self.logprobs)} log-probs and the weight versions of {len(self.versions)}"
            raise EngineError(f"{len(self.tokens)} tokens came with {counts}")

    def sequence(self, sampling: SamplingParams, text: str) -> RolloutSequence:
        """The same as the engine has it."""
        reason: Any = self.finish_reason if self.finish_reason in ("stop", "length") else "abort"
        return RolloutSequence(
            self.tokens,
            self.logprobs,
            reason,
            text,
            self.versions,
            top_logprobs=self.top,
            temperature=sampling.logprob_temperature,
        )


class ServerCalls(Protocol):
    """The calls of one product. Each raises EngineError where the server refuses or is gone."""

    product: str

    async def describe(self, http: httpx.AsyncClient) -> Served:
        """Called when the server is healthy, before anything else."""

    async def generate(self, http: httpx.AsyncClient, sample: Sample) -> Answer:
        """One answer, with log-probs and the weight version of each token."""

    async def abort(self, http: httpx.AsyncClient, rids: list[str]) -> None:
        """End samples; their calls answer with what there is. One that the server has not begun yet may begin nevertheless."""

    async def load_weights(self, http: httpx.AsyncClient, folder: Path, version: int) -> None:
        """Take over a checkpoint between two tokens of everything that runs. What was computed with old weights is dropped."""

    async def load_adapter(self, http: httpx.AsyncClient, name: str, folder: Path, outdated: str) -> None:
        """Serve an adapter under a name, and forget the one that was called ``outdated``, if any."""

    async def logprobs(self, http: httpx.AsyncClient, prompt: list[int]) -> list[float]:
        """Log-prob of each token of a prompt but the first, at temperature 1."""


@runtime_checkable
class TransferCalls(Protocol):
    """The calls of a product that can take weights from a broadcast; ``transfers`` says whether this server does."""

    transfers: bool

    async def world_size(self, http: httpx.AsyncClient) -> int:
        """Workers of the server."""

    async def join_group(
        self, http: httpx.AsyncClient, store: tuple[str, int], first: int, size: int, patience_s: float
    ) -> None:
        """Have them join a group of ``size`` at a store, as its members from ``first`` on."""

    async def receive(
        self, http: httpx.AsyncClient, specs: Sequence[TensorSpec], bucket_bytes: int, version: int
    ) -> None:
        """As :meth:`ServerCalls.load_weights`, with what the group's first member sends."""


def versions_of(spans: Iterable[Mapping[str, Any]]) -> list[int]:
    """The version of each token, from spans with ``version``, ``start`` and ``end``."""
    return [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]


def sampling_of(sampling: SamplingParams) -> dict[str, Any]:
    """What both products call by the same names in the ``sampling_params`` of a request."""
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


async def ask(http: httpx.AsyncClient, path: str, body: Any = None, **parameters: Any) -> Any:
    """POST, and the JSON that comes back, None where there is no JSON. Raises EngineError: see :class:`ServerCalls`."""
    return await _answered(http, path, http.post(path, json={} if body is None else body, params=parameters))


async def look(http: httpx.AsyncClient, path: str) -> Any:
    """The same by GET; again where the server has just closed the connection, as it does after an error of its own."""
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
        raise EngineError(f"{http.base_url}{path}: {type(error).__name__}: {error}") from error
    if answer.status_code >= 300:
        raise EngineError(f"{http.base_url}{path}: status {answer.status_code}: {_reason(answer)}")
    return answer.json() if answer.headers.get("content-type", "").startswith("application/json") else None


def _reason(answer: httpx.Response) -> str:
    try:
        found = answer.json()
        return str(found.get("error", found).get("message", found))[:500]
    except (ValueError, AttributeError):
        return answer.text[:500]
