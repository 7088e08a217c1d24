"""The layer between HTTP and the engine: server state, admission control and the requests in flight.

Almost all code runs in the thread of the event loop, with two exceptions. The thread that loads the model calls
:meth:`Service.attach`, and sets :attr:`Service.failure` if loading fails. :meth:`Service.prepare` runs functions in
worker threads, and these functions call :meth:`Service.seeds`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import math
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from areno.engine.rollout.counter_rng import derive_seed
from areno.errors import EngineError, GrammarError
from areno.serving.errors import ApiError, bad_field
from areno.serving.formats import Formats
from areno.serving.generation import Generation
from areno.serving.metrics import ServingMetrics
from areno.serving.recording import Recorder
from areno.serving.token_text import TokenTexts
from areno.types import Request

if TYPE_CHECKING:
    from areno.engine.backend import Backend

State = Literal["loading", "ready", "draining", "failed"]
Result = TypeVar("Result")

_RETRY = {"Retry-After": "1"}  # seconds
# Number of threads that render templates, tokenize and compile grammars, so that a slow request does not block others.
_PREPARE_THREADS = 4
PREPARE_TIMEOUT_S = 60.0
# A token of prose has about four characters. A request above this limit cannot fit, and tokenizing it would take long.
_CHARS_PER_TOKEN, _MIN_CHAR_LIMIT = 16, 2**16

_SERVING_GC_THRESHOLDS = (50_000, 20, 20)
_gc_lock = threading.Lock()
_previous_thresholds: list[tuple[int, int, int]] = []  # one entry per running server


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """Settings of a server."""

    model_name: str  # model name in requests and responses
    default_max_tokens: int = 1024  # maximum response length in tokens if the request sets none
    max_queue: int = 256  # maximum waiting samples; further requests get status 429
    api_key: str | None = None  # bearer token that clients must send; None disables authentication
    disable_thinking: bool = False  # pass ``enable_thinking=False`` to chat templates unless the request overrides it
    tool_call_parser: str = "auto"  # tool-call format, or ``auto``
    reasoning_parser: str = "auto"  # reasoning format, or ``auto``
    cors_origins: tuple[str, ...] = ()  # origins whose web pages may call the server
    allowed_hosts: tuple[str, ...] = ()  # Host names accepted besides loopback when there is no key; ``*`` allows any
    max_connections: int | None = None  # maximum open connections; None is unlimited
    max_body_bytes: int = 16 * 2**20  # maximum size of a request body
    # maximum characters of a request; None: 16 per token of the context length, but at least 65,536
    max_prompt_chars: int | None = None
    request_timeout_s: float | None = None  # maximum time until a request is answered; None is unlimited


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model: its engine, its reasoning and tool-call formats, and the text of each token id."""

    engine: Backend
    formats: Formats
    texts: TokenTexts


class Service:
    """Server state and admission control.

    ``engine`` is None until the model is loaded. A ``recorder`` stores conversations for training. With a recorder, clients
    must use an API key that the recorder knows; ``config.api_key`` is not accepted.
    """

    def __init__(self, config: ServingConfig, engine: Backend | None = None, recorder: Recorder | None = None) -> None:
        self.config, self.recorder = config, recorder
        self.metrics = ServingMetrics()
        self._model: ServedModel | None = None
        self.failure = ""  # why the engine stopped; empty while it works
        self._draining = False
        self._open: dict[Generation, int] = {}  # number of samples of each running or waiting generation
        self._prompt_numbers = itertools.count(1)  # counts atomically: several threads call `seeds`
        self._preparing_samples = 0
        # Only one thread may write a recorder's conversations.
        self._prepare_pool = ThreadPoolExecutor(1 if recorder else _PREPARE_THREADS, "areno-serving-prepare")
        self._while_serving = contextlib.ExitStack()
        if engine is not None:
            self.attach(engine)

    # -- state -----------------------------------------------------------------------------------------------------

    def attach(self, engine: Backend) -> None:
        """Start serving a loaded model. Raises UsageError if the configured tool-call or reasoning parser is unknown."""
        formats = Formats(engine, self.config.tool_call_parser, self.config.reasoning_parser)
        self.metrics.watch(engine)
        self._model = ServedModel(engine, formats, TokenTexts(engine.tokenizer))
        self._while_serving.enter_context(reduced_gc())

    @property
    def state(self) -> State:
        """Whether the server is loading, ready, draining or failed."""
        if self.failure:
            return "failed"
        if self._draining:
            return "draining"
        return "ready" if self._model is not None else "loading"

    @property
    def open_samples(self) -> int:
        """Number of running and waiting samples."""
        return sum(self._open.values())

    def ready_model(self) -> ServedModel:
        """Return the served model. Raises ApiError 503 if the server is not ready."""
        if self.state == "ready" and self._model is not None:
            return self._model
        if self.state == "loading":
            raise ApiError(503, "the model is still loading; retry later", code="loading", headers=_RETRY)
        if self.state == "draining":
            raise ApiError(503, "the server is shutting down; retry later", code="draining", headers=_RETRY)
        raise ApiError(503, f"the engine failed: {self.failure}; restart the server", code="engine_failed")

    def check_model(self, name: str | None) -> None:
        """Check the model name of a request. Raises ApiError 404 if the name is neither None nor that of the served model."""
        served = self.config.model_name
        if name is not None and name != served:
            message = f"model: {name!r} is not served; use {served!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    # -- requests --------------------------------------------------------------------------------------------------

    def check_characters(self, characters: int) -> None:
        """Raise ApiError 400 if a request has too much text. Called before tokenizing.

        A server that records conversations for training skips the check. If a recorded conversation is too long for the
        context, the client (an agent) must receive an empty response (see :func:`build_job`), not an error.
        """
        if self.recorder is not None:
            return
        engine = self.ready_model().engine
        tokens = min(engine.context_length or engine.kv_tokens, engine.kv_tokens)
        limit = self.config.max_prompt_chars or max(_CHARS_PER_TOKEN * tokens, _MIN_CHAR_LIMIT)
        if characters > limit:
            message = (
                f"the request has {characters} characters of text, but the limit is {limit} for a context of {tokens} tokens; "
                "shorten the text"
            )
            raise ApiError(400, message, code="context_length_exceeded")

    def deadline(self) -> float:
        """Return the deadline of a request that starts now, as a time on the event loop's clock. Infinite if no timeout is
        configured."""
        return asyncio.get_running_loop().time() + (self.config.request_timeout_s or math.inf)

    async def prepare(self, work: Callable[[], Result], samples: int, deadline: float = math.inf) -> Result:
        """Run ``work`` in a thread, and return its result. Meanwhile, the request occupies ``samples`` places in the queue.

        Raises ApiError 429 if the queue is full. Raises ApiError 504 at ``deadline``, or after ``PREPARE_TIMEOUT_S``.
        ``PREPARE_TIMEOUT_S`` does not apply if the server records conversations: a single thread then prepares all requests
        one after another, so a request may have to wait for many others.
        """
        self.check_capacity(samples)
        self._preparing_samples += samples
        loop = asyncio.get_running_loop()
        own_limit = math.inf if self.recorder else PREPARE_TIMEOUT_S
        limit = min(own_limit, self.config.request_timeout_s or own_limit)
        ends = min(loop.time() + own_limit, deadline)
        try:
            async with asyncio.timeout_at(ends if ends < math.inf else None):
                return await loop.run_in_executor(self._prepare_pool, work)
        except TimeoutError as error:
            message = (
                f"preparing the request took more than {limit:g} s; send less text, fewer tools or a smaller schema"
            )
            raise ApiError(504, message, code="timeout") from error
        finally:
            self._preparing_samples -= samples

    def seeds(self, base: int | None, samples: int) -> list[int]:
        """Return the seeds of a prompt's samples, derived from ``base`` as in areno's SDK. If ``base`` is None, each call
        returns new seeds."""
        if base is not None:
            return [derive_seed(base, index) for index in range(samples)]
        number = next(self._prompt_numbers)
        return [derive_seed(self.metrics.started_ns, number, index) for index in range(samples)]

    def check_capacity(self, samples: int) -> None:
        """Check that the queue has room for ``samples``.

        Raises ApiError 429 if the queue is full. Raises ApiError 400 if even an empty queue has no room for ``samples``.
        """
        limit = self.ready_model().engine.config.max_running + self.config.max_queue
        if samples > limit:
            message = f"{samples} samples in one request exceed this server's limit of {limit}; request fewer samples"
            raise bad_field("n", message, code="too_many_samples")
        taken = self.open_samples + self._preparing_samples
        if taken + samples > limit:
            message = f"the queue has no room for {samples} samples ({taken} of {limit} places are taken); retry later"
            raise ApiError(429, message, code="queue_full", headers=_RETRY)

    def generate(self, requests: Sequence[Request], streams: bool) -> Generation:
        """Start generating. If ``streams`` is true, tokens are delivered as they are sampled.

        Raises ApiError 400, 429 or 503.
        """
        engine = self.ready_model().engine
        samples = sum(request.n for request in requests)
        self.check_capacity(samples)
        try:
            generation = Generation(engine, self.metrics, requests, lambda: self._open.pop(generation, None), streams)
        except EngineError as error:
            raise ApiError(503, f"the engine rejected the request: {error}", code="engine_failed") from error
        self._open[generation] = samples
        return generation

    def api_error(self, error: EngineError) -> ApiError:
        """Return the response to a request that failed with ``error``.

        If the whole engine has failed, set :attr:`failure`, so that later requests are rejected.
        """
        if isinstance(error, GrammarError):
            return ApiError(400, f"{error}; simplify the schema", code="grammar_failed")
        if self._model is not None and self._model.engine.failed:
            self.failure = str(error)
            return ApiError(500, f"generation failed: {error}", code="engine_failed")
        return ApiError(500, f"generation failed: {error}", code="generation_failed")

    # -- shutdown --------------------------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> int:
        """Reject new requests, wait up to ``timeout_s`` seconds until all samples have ended, and cancel the remaining samples.
        Return the number of cancelled samples."""
        self._draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        cancelled = self.open_samples
        for generation in list(self._open):
            generation.cancel()
        return cancelled

    def close(self) -> None:
        """Stop the helper threads. The engine keeps running, and must be closed by the caller."""
        self._while_serving.close()
        self._prepare_pool.shutdown(wait=False, cancel_futures=True)


async def first_done(work: Coroutine[Any, Any, Result], other: Coroutine[Any, Any, None]) -> Result | None:
    """Run two coroutines until one has finished. Return the result of ``work``. If ``other`` finished first, return None."""
    main, side = asyncio.ensure_future(work), asyncio.ensure_future(other)
    try:
        await asyncio.wait((main, side), return_when=asyncio.FIRST_COMPLETED)
        return main.result() if main.done() else None
    finally:
        for task in (main, side):
            task.cancel()
        await asyncio.gather(main, side, return_exceptions=True)


@contextlib.contextmanager
def reduced_gc() -> Iterator[None]:
    """Collect garbage less often, and never scan the objects that exist now, such as the model and the tokenizer.

    With Python's default thresholds, collections take a fifth of a server's time, because each full collection scans a million
    long-lived objects. When the last server in this process ends, the old thresholds are restored, so that later training in
    the same process releases unused tensors early.
    """
    _freeze_heap()
    with _gc_lock:
        _previous_thresholds.append(gc.get_threshold())
        if gc.get_threshold()[0]:  # 0 means that the program turned collection off
            gc.set_threshold(*_SERVING_GC_THRESHOLDS)
    try:
        yield
    finally:
        with _gc_lock:
            previous = _previous_thresholds.pop()
            if not _previous_thresholds and gc.get_threshold() == _SERVING_GC_THRESHOLDS:
                gc.set_threshold(*previous)


@functools.cache
def _freeze_heap() -> None:
    """Exclude all current objects from garbage collection. Only the first call has an effect.

    If each call excluded the current objects, reference cycles that were created between two calls would never be freed.
    """
    gc.collect()
    gc.freeze()
