"""Sends complete or streamed responses, and cancels generation as soon as the client disconnects."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from areno.errors import EngineError
from areno.observability import tracing
from areno.serving.chat_api import ChatResponse
from areno.serving.completions_api import CompletionResponse
from areno.serving.errors import ApiError, unexpected
from areno.serving.generation import Generation, by_sample
from areno.serving.protocol_adapter import ProtocolAdapter
from areno.serving.request_builder import GenerationJob
from areno.serving.response_base import event
from areno.serving.service import Service, first_done

ResponseBuilder = ChatResponse | CompletionResponse | ProtocolAdapter

_CLIENT_CLOSED_REQUEST = 499


async def respond(
    service: Service, request: Request, job: GenerationJob, builder: ResponseBuilder, deadline: float
) -> Response:
    """Generate a response, and return it as a stream or as a whole. ``deadline`` is a result of :meth:`Service.deadline`.

    Raises ApiError if the queue is full, the server shuts down, the request times out, or the engine fails. If a stream has
    already started, the error becomes its last event.
    """
    generation = service.generate(job.requests, streams=bool(job.body.stream))
    if job.body.stream:
        return EventStream(service, generation, builder, deadline)
    watcher = asyncio.create_task(disconnected(request.receive))
    watcher.add_done_callback(lambda _: generation.cancel())  # ends `_collect`
    try:
        async with tracing.atrace_session_phase("generate"), _until(deadline, service):
            return JSONResponse(await _collect(service, generation, builder))
    except ApiError:
        if not watcher.done():
            raise
        service.metrics.disconnects.inc()
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    finally:
        watcher.cancel()


def respond_at_once(job: GenerationJob, chunks: list[dict[str, Any]], builder: ResponseBuilder) -> Response:
    """Return the empty response to a prompt that fills the context. ``chunks`` is used only if the response is streamed."""
    if not job.body.stream:
        return JSONResponse(builder.complete())
    return Response(_joined([*chunks, *builder.closing()]) + builder.ending, media_type=EventStream.media_type)


@contextlib.asynccontextmanager
async def _until(deadline: float, service: Service) -> AsyncIterator[None]:
    """Cancel the body of the ``async with`` statement at ``deadline``, and then raise ApiError 504."""
    try:
        async with asyncio.timeout_at(deadline if deadline < math.inf else None):
            yield
    except TimeoutError as error:
        limit = service.config.request_timeout_s
        raise ApiError(504, f"the request timed out after {limit:g} s; request fewer tokens", code="timeout") from error


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response that is sent as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, generation: Generation, builder: ResponseBuilder, deadline: float) -> None:
        self._service, self._generation, self._builder, self._deadline = service, generation, builder, deadline
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the response is complete or the client disconnects."""
        try:
            if await first_done(self._send(send), disconnected(receive)) is None:
                self._service.metrics.disconnects.inc()
        finally:
            self._generation.cancel()

    async def _send(self, send: Send) -> bool:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            # The deadline also ends a wait for a slow client.
            async with tracing.atrace_session_phase("generate"), _until(self._deadline, self._service):
                async for data in self._events():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:  # the status line has been sent, so the error goes into the stream
            data = event(self._builder.failure(_as_api_error(self._service, error)))
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True

    async def _events(self) -> AsyncIterator[bytes]:
        yield _joined(self._builder.opening())
        async for tokens in self._generation.tokens():
            chunks = [chunk for batch in by_sample(tokens) for chunk in self._builder.push(*batch)]
            if chunks:
                yield _joined(chunks)
        self._builder.check()
        yield _joined(self._builder.closing()) + self._builder.ending


def _joined(chunks: list[dict[str, Any]]) -> bytes:
    return b"".join(map(event, chunks))


async def _collect(service: Service, generation: Generation, builder: ResponseBuilder) -> dict[str, Any]:
    try:
        async for tokens in generation.tokens():
            for batch in by_sample(tokens):
                builder.push(*batch)
    except EngineError as error:
        raise _as_api_error(service, error) from error
    builder.check()
    return builder.complete()


def _as_api_error(service: Service, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineError):
        return service.api_error(error)
    return unexpected(error)
