"""What stands between HTTP and the engine: the state of the server, the bounded queue, and who is being served.

All of it lives in the event loop's thread; from others, :meth:`Service.attach` is called and :attr:`Service.failure` set.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from areno.engine.rollout.counter_rng import derive_seed
from areno.errors import EngineError
from areno.serving.errors import ApiError, bad_field
from areno.serving.formats import Formats
from areno.serving.generation import Generation
from areno.serving.metrics import ServingMetrics
from areno.serving.recording import Recorder
from areno.serving.text import TokenTexts
from areno.types import Request

if TYPE_CHECKING:
    from areno.engine.backend import Backend

State = Literal["loading", "ready", "draining", "failed"]
Result = TypeVar("Result")

_RETRY = {"Retry-After": "1"}  # seconds
# Threads that render, encode and compile: one request that takes long must not hold up the others.
_PREPARING_THREADS = 4
PREPARE_TIMEOUT_S = 60.0
# Beyond this, no text fits: a token of running text has about four characters. Encoding it would take long all the same.
_CHARS_PER_TOKEN, _LEAST_CHARS = 16, 2**16

_SELDOM = (50_000, 20, 20)  # thresholds of the garbage collector
_collector_lock = threading.Lock()
_usual: list[tuple[int, int, int]] = []  # thresholds before each server that runs


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """How a server answers."""

    model_name: str  # the model's name in requests and answers
    default_max_tokens: int = 1024  # length of an answer whose request names none, in tokens
    max_queue: int = 256  # most samples that wait while others run; more are refused with status 429
    api_key: str | None = None  # what clients must send as bearer token; None lets everybody in
    disable_thinking: bool = False  # pass ``enable_thinking=False`` to chat templates unless a request says otherwise
    tool_call_parser: str = "auto"  # name of the format of tool calls, or ``auto``
    reasoning_parser: str = "auto"  # name of the format of reasoning, or ``auto``
    cors_origins: tuple[str, ...] = ()  # origins whose web pages may call the server
    allowed_hosts: tuple[str, ...] = ()  # besides loopback, by which a server without a key may be called; ``*`` is any
    max_connections: int | None = None  # most connections that are open; None is any number
    max_body_bytes: int = 16 * 2**20  # most bytes of a request
    max_prompt_chars: int | None = None  # of a request; None is 16 for each token of the context, at least 65,536
    request_timeout_s: float | None = None  # longest that a request may take; None waits as long as the client does


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is loaded: its engine, how it writes, and what its tokens look like."""

    engine: Backend
    formats: Formats
    texts: TokenTexts


class Service:
    """What the module's text says; ``engine`` is None while it is loaded, a ``recorder`` knows the API keys instead."""

    def __init__(self, config: ServingConfig, engine: Backend | None = None, recorder: Recorder | None = None) -> None:
        self.config, self.recorder = config, recorder
        self.metrics = ServingMetrics()
        self._model: ServedModel | None = None
        self.failure = ""  # why the engine can serve no more; empty while it can
        self._draining = False
        self._open: dict[Generation, int] = {}  # generations that are not over, and their samples
        self._requests = 0
        self._in_preparation = 0  # samples
        # A recorder's tapes are written by one thread.
        self._preparing = ThreadPoolExecutor(1 if recorder else _PREPARING_THREADS, "areno-serving-prepare")
        self._while_serving = contextlib.ExitStack()
        if engine is not None:
            self.attach(engine)

    # -- state -----------------------------------------------------------------------------------------------------

    def attach(self, engine: Backend) -> None:
        """The model is loaded: serve from now on. Raises UsageError: the configuration names a format that does not exist."""
        formats = Formats(engine, self.config.tool_call_parser, self.config.reasoning_parser)
        self.metrics.watch(engine)
        self._model = ServedModel(engine, formats, TokenTexts(engine.tokenizer))
        self._while_serving.enter_context(seldom_collections())

    @property
    def state(self) -> State:
        """Where the server is in its life."""
        if self.failure:
            return "failed"
        if self._draining:
            return "draining"
        return "ready" if self._model is not None else "loading"

    @property
    def open_samples(self) -> int:
        """Samples that run or wait."""
        return sum(self._open.values())

    def ready_model(self) -> ServedModel:
        """The model. Raises ApiError: 503, the server is not in the state to take requests."""
        if self.state == "ready" and self._model is not None:
            return self._model
        if self.state == "loading":
            raise ApiError(503, "the model is still being loaded; try again", code="loading", headers=_RETRY)
        if self.state == "draining":
            raise ApiError(503, "the server is shutting down", code="draining", headers=_RETRY)
        raise ApiError(503, f"the engine has failed: {self.failure}; restart the server", code="engine_failed")

    def check_model(self, name: str | None) -> None:
        """Check the model that a request names; none is fine. Raises ApiError: 404, it is another one."""
        known = self.config.model_name
        if name is not None and name != known:
            message = f"model: {name!r} is not served here; this server has {known!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    # -- requests --------------------------------------------------------------------------------------------------

    def check_characters(self, characters: int) -> None:
        """Check that a request's text is not too long to be worth encoding. Raises ApiError: 400, it is."""
        if self.recorder is not None:
            return  # its clients are this program's own, and are told by an empty answer that the context is full
        engine = self.ready_model().engine
        tokens = min(engine.context_length or engine.kv_tokens, engine.kv_tokens)
        limit = self.config.max_prompt_chars or max(_CHARS_PER_TOKEN * tokens, _LEAST_CHARS)
        if characters > limit:
            message = (
                f"the request has {characters} characters of text, and this server takes {limit} for its context of "
                f"{tokens} tokens; shorten it"
            )
            raise ApiError(400, message, code="context_length_exceeded")

    async def prepare(self, work: Callable[[], Result], samples: int) -> Result:
        """Run ``work`` in another thread; its samples take room meanwhile. Raises ApiError: 429 full queue, 504 too slow."""
        self.make_room(samples)
        self._in_preparation += samples
        limit = min(PREPARE_TIMEOUT_S, self.config.request_timeout_s or PREPARE_TIMEOUT_S)
        try:
            async with asyncio.timeout(limit):
                return await asyncio.get_running_loop().run_in_executor(self._preparing, work)
        except TimeoutError as error:
            message = f"the request was not ready to be answered within {limit:g} s; send less text, tools or schema"
            raise ApiError(504, message, code="timeout") from error
        finally:
            self._in_preparation -= samples

    def seeds(self, base: int | None, samples: int) -> list[int]:
        """Seeds of the samples of a prompt, as the SDK derives them from ``base``; new ones each time without."""
        if base is not None:
            return [derive_seed(base, index) for index in range(samples)]
        self._requests += 1
        return [derive_seed(self.metrics.started_ns, self._requests, index) for index in range(samples)]

    def make_room(self, samples: int) -> None:
        """Check that the queue takes so many samples more. Raises ApiError: 429 it is full; 400 none would be long enough."""
        limit = self.ready_model().engine.config.max_running + self.config.max_queue
        if samples > limit:
            message = f"{samples} samples in one request, but this server takes {limit} at once; send fewer"
            raise bad_field("n", message, code="too_many_samples")
        taken = self.open_samples + self._in_preparation
        if taken + samples > limit:
            message = f"the queue is full ({taken} samples of at most {limit}); try again later"
            raise ApiError(429, message, code="queue_full", headers=_RETRY)

    def generate(self, requests: Sequence[Request], streams: bool) -> Generation:
        """Start generating; ``streams``: tokens are wanted as they come. Raises ApiError: full, not ready, or refused."""
        engine = self.ready_model().engine
        samples = sum(request.n for request in requests)
        self.make_room(samples)
        try:
            generation = Generation(engine, self.metrics, requests, lambda: self._open.pop(generation, None), streams)
        except EngineError as error:
            raise ApiError(503, f"the engine takes no requests: {error}", code="engine_failed") from error
        self._open[generation] = samples
        return generation

    # -- the end ---------------------------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> int:
        """Take nothing new, wait for what runs, and cancel after ``timeout_s``; returns how many samples were cancelled."""
        self._draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        cancelled = self.open_samples
        for generation in list(self._open):
            generation.cancel()
        return cancelled

    def close(self) -> None:
        """Let the helper threads end; the engine is its owner's to close."""
        self._while_serving.close()
        self._preparing.shutdown(wait=False, cancel_futures=True)


async def first_done(work: Coroutine[Any, Any, Result], other: Coroutine[Any, Any, None]) -> Result | None:
    """Run both; the result of ``work``, or None where ``other`` ended first. What is left over is cancelled."""
    main, side = asyncio.ensure_future(work), asyncio.ensure_future(other)
    try:
        await asyncio.wait((main, side), return_when=asyncio.FIRST_COMPLETED)
        return main.result() if main.done() else None
    finally:
        for task in (main, side):
            task.cancel()
        await asyncio.gather(main, side, return_exceptions=True)


@contextlib.contextmanager
def seldom_collections() -> Iterator[None]:
    """Let the collector look seldom, and no longer at what existed before: modules, model, tokenizer.

    A server makes many small objects that are no garbage yet; going through them, and through a million others in each
    full collection, was a fifth of its time. Afterwards it looks as often as before: training must not keep dead tensors.
    """
    _keep_heap_out_of_collections()
    with _collector_lock:
        _usual.append(gc.get_threshold())
        if gc.get_threshold()[0]:  # 0 is how a program turns collections off
            gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        with _collector_lock:
            before = _usual.pop()
            if not _usual and gc.get_threshold() == _SELDOM:
                gc.set_threshold(*before)


@functools.cache
def _keep_heap_out_of_collections() -> None:
    """Once per process: a second time would keep what has become garbage since."""
    gc.collect()
    gc.freeze()
