"""The HTTP application: routes, and around them the key, the body limit and the counters.

The same application serves a machine (``areno serve``) and, inside a process, the agents of a rollout session.
"""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from areno import __version__
from areno.serving.blocks import BlockAnswer
from areno.serving.chat import ChatAnswer, prepare_chat
from areno.serving.completions import CompletionAnswer, prepare_completion
from areno.serving.errors import ApiError, install_error_handlers
from areno.serving.guard import TAPE, Guard
from areno.serving.messages import MessagesAnswer, MessagesRequest
from areno.serving.recording import sampling_defaults
from areno.serving.respond import respond, respond_at_once
from areno.serving.responses import ResponsesAnswer, ResponsesRequest
from areno.serving.schemas import ChatRequest, CompletionRequest, GenerationBody, RewardRequest
from areno.serving.service import ServedModel, Service

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    for status, text in {
        400: "A field cannot work.",
        401: "The API key is missing or wrong.",
        403: "The request was meant for another host.",
        404: "Another model is served.",
        413: "The body is too large.",
        429: "The queue is full.",
        503: "The model is being loaded, or the server is shutting down.",
        504: "The request took too long.",
    }.items()
}


def create_app(service: Service) -> FastAPI:
    """Make the application."""
    app = FastAPI(title="areno", version=__version__, docs_url=None, redoc_url=None)
    install_error_handlers(app)
    _add_status(app, service)
    _add_generation(app, service)
    if service.recorder is not None:
        _add_rewards(app, service)
    app.add_middleware(Guard, service=service)
    if service.config.cors_origins:
        origins = list(service.config.cors_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    _describe_errors(app)
    return app


def _add_status(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        """Requests are taken; 503 while the model is loaded, while the server shuts down, and once its engine has failed."""
        state = service.state
        shown = {"ready": "ok", "failed": service.failure}.get(state, state)
        return JSONResponse({"status": shown}, 200 if state == "ready" else 503)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """The same as ``/health``, with the name of the state."""
        return JSONResponse({"status": service.state}, 200 if service.state == "ready" else 503)

    @app.get("/live")
    async def live() -> JSONResponse:
        """The process can work, even while the model is loaded; 503 once its engine has failed for good."""
        failed = service.state == "failed"
        return JSONResponse({"status": service.failure if failed else "ok"}, 503 if failed else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Counters in Prometheus' text format."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def model(name: str) -> dict[str, Any]:
        """The model, by its name."""
        service.check_model(name)
        return _model(service)


def _model(service: Service) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": service.config.model_name, "object": "model", "owned_by": "areno"}
    entry["created"] = service.metrics.started_ns // 10**9
    if service.state == "ready":
        entry["max_model_len"] = service.ready_model().engine.context_length
    return entry


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses=_ERRORS)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await _chat(service, request, body, lambda answer: answer)

    @app.post("/v1/responses", responses=_ERRORS)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation, in the form of OpenAI's Responses API."""
        return await _chat(service, request, body.chat(), lambda answer: ResponsesAnswer(answer, body))

    @app.post("/v1/messages", responses=_ERRORS)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation, in the form of Anthropic's Messages API."""
        return await _chat(service, request, body.chat(), MessagesAnswer)

    @app.post("/v1/completions", responses=_ERRORS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts or tokens."""
        model = _admit(service, body)
        job = await service.prepare(lambda: prepare_completion(service, model.engine, body), body.samples)
        answer = CompletionAnswer(job, service.config.model_name, model.texts)
        return await respond(service, request, job, answer)


def _add_rewards(app: FastAPI, service: Service) -> None:
    @app.post("/rl/set_reward", responses=_ERRORS)
    async def set_reward(body: RewardRequest, request: Request) -> dict[str, Any]:
        """Reward an answer that was given under this key."""
        try:
            request.scope[TAPE].set_reward(body.reward, body.interaction_id)
        except ValueError as error:
            raise ApiError(404, str(error), param="interaction_id", code="interaction_not_found") from error
        return {"message": "success"}


async def _chat(
    service: Service, request: Request, body: ChatRequest, told: Callable[[ChatAnswer], ChatAnswer | BlockAnswer]
) -> Response:
    """Answer a conversation; ``told`` brings the answer into the form of a protocol."""
    model, tape = _admit(service, body), request.scope.get(TAPE)
    if service.recorder is not None:
        body = body.with_defaults(sampling_defaults(service.recorder.sampling))
    prepared = await service.prepare(lambda: prepare_chat(service, model, body, tape), body.samples)
    answer = told(ChatAnswer(prepared, service.config.model_name, model.texts, service.metrics))
    if prepared.job.context_full:
        return respond_at_once(prepared.job, answer.without_tokens(), answer)
    return await respond(service, request, prepared.job, answer)


def _admit(service: Service, body: GenerationBody) -> ServedModel:
    """What can be refused before any work is refused here."""
    model = service.ready_model()
    service.check_model(body.model)
    service.check_characters(body.characters)
    return model


def _describe_errors(app: FastAPI) -> None:
    """Put the shape of errors into the OpenAPI description, in place of the framework's own."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        page = describe()
        schemas = page.setdefault("components", {}).setdefault("schemas", {})
        one, some = {"type": "string"}, {"type": ["string", "null"]}
        fields = {"message": one, "type": one, "param": some, "code": some}
        error = {"type": "object", "required": list(fields), "properties": fields}
        schemas["Error"] = {"type": "object", "required": ["error"], "properties": {"error": error}}
        for path in page["paths"].values():
            for operation in path.values():
                operation.get("responses", {}).pop("422", None)
        return page

    app.openapi = openapi  # type: ignore[method-assign]
