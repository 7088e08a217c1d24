"""Sending an answer, whole or as a stream, to a client that may go away at any moment.

Who goes away cancels the request in the engine at once: one task waits for the end of the connection while another waits
for tokens.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from areno.errors import EngineError
from areno.observability import tracing
from areno.serving.blocks import BlockAnswer
from areno.serving.chat import ChatAnswer
from areno.serving.completions import CompletionAnswer
from areno.serving.errors import ApiError, unexpected
from areno.serving.generation import Generation, by_sample
from areno.serving.job import Job
from areno.serving.service import Service, first_done
from areno.serving.wire import event

Answer = ChatAnswer | CompletionAnswer | BlockAnswer

_CLIENT_GONE = 499


async def respond(service: Service, request: Request, job: Job, answer: Answer) -> Response:
    """Generate, and answer in the way that the request asks for. Raises ApiError: full queue, shutdown or failed engine."""
    generation = service.generate(job.requests, streams=bool(job.body.stream))
    if job.body.stream:
        return EventStream(service, generation, answer)
    watching = asyncio.create_task(disconnected(request.receive))
    watching.add_done_callback(lambda _: generation.cancel())  # which ends the collecting
    try:
        async with tracing.atrace_session_phase("generate"), _deadline(service):
            return JSONResponse(await _collect(service, generation, answer))
    except ApiError:
        if not watching.done():
            raise
        service.metrics.disconnects.inc()
        return Response(status_code=_CLIENT_GONE)
    finally:
        watching.cancel()


def respond_at_once(job: Job, chunks: list[dict[str, Any]], answer: Answer) -> Response:
    """Send an answer that needs no tokens."""
    if not job.body.stream:
        return JSONResponse(answer.complete())
    return Response(_joined([*chunks, *answer.closing()]) + answer.ending, media_type=EventStream.media_type)


@contextlib.asynccontextmanager
async def _deadline(service: Service) -> AsyncIterator[None]:
    """Bounds what a request may take. Raises ApiError: 504, it has taken too long."""
    limit = service.config.request_timeout_s
    try:
        async with asyncio.timeout(limit):
            yield
    except TimeoutError as error:
        raise ApiError(504, f"no answer within {limit:g} s; ask for fewer tokens", code="timeout") from error


async def disconnected(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An answer as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, generation: Generation, answer: Answer) -> None:
        self._service, self._generation, self._answer = service, generation, answer
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the answer or the connection ends."""
        try:
            if await first_done(self._send(send), disconnected(receive)) is None:
                self._service.metrics.disconnects.inc()
        finally:
            self._generation.cancel()

    async def _send(self, send: Send) -> bool:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events():
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            async with tracing.atrace_session_phase("generate"), _deadline(self._service):
                yield _joined(self._answer.opening())
                async for tokens in self._generation.tokens():
                    chunks = [chunk for turn in by_sample(tokens) for chunk in self._answer.push(*turn)]
                    if chunks:
                        yield _joined(chunks)
                self._answer.check()
                yield _joined(self._answer.closing()) + self._answer.ending
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the status has been sent; all that is left is to say so in the stream
            yield event(_as_api_error(self._service, error).body)


def _joined(chunks: list[dict[str, Any]]) -> bytes:
    return b"".join(map(event, chunks))


async def _collect(service: Service, generation: Generation, answer: Answer) -> dict[str, Any]:
    try:
        async for tokens in generation.tokens():
            for sample, taken in by_sample(tokens):
                answer.push(sample, taken)
    except EngineError as error:
        raise _as_api_error(service, error) from error
    answer.check()
    return answer.complete()


def _as_api_error(service: Service, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineError):
        service.failure = str(error)
        return ApiError(500, f"generation failed: {error}", code="engine_failed")
    return unexpected(error)
