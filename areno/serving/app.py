"""The HTTP application: routes, their handlers, and middleware.

In ``areno serve``, the application serves clients; in a trainer's process, it serves the agents of a rollout session.
"""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from areno import __version__
from areno.serving.chat_api import ChatResponse, prepare_chat
from areno.serving.completions_api import CompletionResponse, prepare_completion
from areno.serving.errors import ApiError, install_error_handlers
from areno.serving.messages_api import MessagesRequest, MessagesResponse
from areno.serving.middleware import SESSION_RECORDER, RequestMiddleware
from areno.serving.protocol_adapter import ProtocolAdapter
from areno.serving.recording import sampling_defaults
from areno.serving.responses_api import ResponsesRequest, ResponsesResponse
from areno.serving.schemas import ChatRequest, CompletionRequest, GenerationBody, RewardRequest
from areno.serving.service import ServedModel, Service
from areno.serving.streaming import respond, respond_at_once

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    for status, text in {
        400: "A field is invalid.",
        401: "The API key is missing or invalid.",
        403: "The Host header is not allowed.",
        404: "The model, or the response whose reward is to be set, does not exist.",
        413: "The body is too large.",
        429: "The queue is full.",
        503: "The model is loading, the server is shutting down, or the engine has failed.",
        504: "The request timed out.",
    }.items()
}


def create_app(service: Service) -> FastAPI:
    """Create the HTTP application of a service."""
    app = FastAPI(title="areno", version=__version__, docs_url=None, redoc_url=None)
    install_error_handlers(app)
    _add_status(app, service)
    _add_generation(app, service)
    if service.recorder is not None:
        _add_rewards(app, service)
    app.add_middleware(RequestMiddleware, service=service)
    if service.config.cors_origins:
        origins = list(service.config.cors_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    _describe_errors(app)
    return app


def _add_status(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        """Return status 200 if the server accepts requests. While loading, during shutdown, or after an engine failure, return
        503."""
        state = service.state
        status = {"ready": "ok", "failed": service.failure}.get(state, state)
        return JSONResponse({"status": status}, 200 if state == "ready" else 503)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Return the same status codes as ``/health``. The body contains the state of the server."""
        return JSONResponse({"status": service.state}, 200 if service.state == "ready" else 503)

    @app.get("/live")
    async def live() -> JSONResponse:
        """Return status 503 after an engine failure, and otherwise 200, even during loading."""
        failed = service.state == "failed"
        return JSONResponse({"status": service.failure if failed else "ok"}, 503 if failed else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the served model."""
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def model(name: str) -> dict[str, Any]:
        """Describe the served model with this name."""
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
        """Complete a conversation."""
        return await _chat(service, request, body, lambda response: response)

    @app.post("/v1/responses", responses=_ERRORS)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Complete a conversation. The request and the response have the format of OpenAI's Responses API."""
        return await _chat(service, request, body.chat(), lambda response: ResponsesResponse(response, body))

    @app.post("/v1/messages", responses=_ERRORS)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Complete a conversation. The request and the response have the format of Anthropic's Messages API."""
        return await _chat(service, request, body.chat(), MessagesResponse)

    @app.post("/v1/completions", responses=_ERRORS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue text or tokens."""
        deadline, model = service.deadline(), _admit(service, body)
        job = await service.prepare(lambda: prepare_completion(service, model.engine, body), body.samples, deadline)
        builder = CompletionResponse(job, service.config.model_name, model.texts)
        return await respond(service, request, job, builder, deadline)


def _add_rewards(app: FastAPI, service: Service) -> None:
    @app.post("/rl/set_reward", responses=_ERRORS)
    async def set_reward(body: RewardRequest, request: Request) -> dict[str, Any]:
        """Set the reward of a response. The API key of the request identifies the session that contains the response."""
        try:
            request.scope[SESSION_RECORDER].set_reward(body.reward, body.interaction_id)
        except ValueError as error:
            raise ApiError(404, str(error), param="interaction_id", code="interaction_not_found") from error
        return {"message": "success"}


async def _chat(
    service: Service,
    request: Request,
    body: ChatRequest,
    adapt: Callable[[ChatResponse], ChatResponse | ProtocolAdapter],
) -> Response:
    """Complete a conversation. ``adapt`` converts the response to the protocol of the endpoint."""
    deadline, model, recorder = service.deadline(), _admit(service, body), request.scope.get(SESSION_RECORDER)
    if service.recorder is not None:
        body = body.with_defaults(sampling_defaults(service.recorder.sampling))
    prepared = await service.prepare(lambda: prepare_chat(service, model, body, recorder), body.samples, deadline)
    builder = adapt(ChatResponse(prepared, service.config.model_name, model.texts, service.metrics))
    if prepared.job.context_full:
        return respond_at_once(prepared.job, builder.without_tokens(), builder)
    return await respond(service, request, prepared.job, builder, deadline)


def _admit(service: Service, body: GenerationBody) -> ServedModel:
    model = service.ready_model()
    service.check_model(body.model)
    service.check_characters(body.characters)
    return model


def _describe_errors(app: FastAPI) -> None:
    """Replace the framework's error schema in the OpenAPI description with the schema of the actual errors."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        page = describe()
        schemas = page.setdefault("components", {}).setdefault("schemas", {})
        required, optional = {"type": "string"}, {"type": ["string", "null"]}
        fields = {"message": required, "type": required, "param": optional, "code": optional}
        error = {"type": "object", "required": list(fields), "properties": fields}
        schemas["Error"] = {"type": "object", "required": ["error"], "properties": {"error": error}}
        for path in page["paths"].values():
            for operation in path.values():
                operation.get("responses", {}).pop("422", None)
        return page

    app.openapi = openapi  # type: ignore[method-assign]
