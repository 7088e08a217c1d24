"""Errors in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}`` with the matching HTTP status."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from areno.errors import ArenoError

logger = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(ArenoError):
    """An error response. ``code`` is a machine-readable name of the error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the response."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Convert the error to an HTTP response."""
        return JSONResponse(self.body, self.status, self.headers)


def bad_field(param: str, message: str, *, where: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400 error for the field ``param``. The message starts with ``where``, or by default with ``param``."""
    return ApiError(400, f"{where or param}: {message}", param=param, code=code)


def install_error_handlers(app: FastAPI) -> None:
    """Make all endpoints return errors in OpenAI's format."""

    @app.exception_handler(ApiError)
    async def _(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def _(_: Request, error: RequestValidationError) -> JSONResponse:
        return _invalid(error).response()

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error.__cause__, ApiError):  # raised while reading the body
            return error.__cause__.response()
        message = f"{request.method} {request.url.path}: {error.detail}"
        return ApiError(error.status_code, message, headers=dict(error.headers or {}) or None).response()


def unexpected(error: BaseException) -> ApiError:
    """Log an unexpected error with its traceback. The returned error hides the details from the client."""
    logger.error("a request failed: %s: %s", type(error).__name__, error, exc_info=error)
    return ApiError(500, "internal server error; see the server log for the cause", code="internal_error")


def _invalid(error: RequestValidationError) -> ApiError:
    """Convert the most specific validation error to an :class:`ApiError`. A field with a union type has errors for each type of
    the union. The most deeply nested error belongs to the type that fits best. If errors are equally deep, an error about a
    wrong value is more specific than an error about a wrong type.
    """
    errors = error.errors()
    first = max(errors, key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    names = [str(part) for part in first["loc"][1:]]
    if not names:
        return ApiError(400, f"the body is invalid: {first['msg']}; send a JSON object as application/json")
    field = names[0]
    others = {one["loc"][1] for one in errors if len(one["loc"]) > 1} - {field}
    also = f" (and {', '.join(sorted(map(str, others)))})" if others else ""
    return bad_field(field, f"{first['msg']}{also}", where=".".join(names), code=str(first["type"]))
