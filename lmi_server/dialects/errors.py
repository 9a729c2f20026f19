"""Writes errors for the wire: one table of statuses and types, one body per dialect.

The worker and the front end both use it, so that an error reads the same wherever it was raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lmi_server.contract import errors
from lmi_server.contract.errors import LmiServerError
from lmi_server.dialects.framing import JSON_LINES, SSE, encode, named_event
from lmi_server.dialects.optional import ErrorForm, optional_dialects
from lmi_server.dialects.routes import OPENAI_ROUTES

_RERANK = "v2/rerank"  # vLLM's path, unlike the others below /v2


class _Row(NamedTuple):
    """One class of error: status, `type` and `code` in OpenAI's form; status and `type` in LMI's."""

    openai_status: int
    openai_type: str
    openai_code: str | None
    lmi_status: int
    lmi_type: str


# The first class of an error's class hierarchy that has a row decides. LMI answers 424 (Failed Dependency) whenever its
# Python process refuses a request or fails; other statuses come from its Java server.
_ROWS: dict[type[LmiServerError], _Row] = {
    errors.ContextLengthError: _Row(
        400, "invalid_request_error", "context_length_exceeded", 424, "BadRequestException"
    ),
    errors.PayloadTooLargeError: _Row(413, "invalid_request_error", None, 413, "PayloadTooLargeException"),
    errors.QuarantinedError: _Row(
        422, "invalid_request_error", "request_quarantined", 422, "RequestQuarantinedException"
    ),
    errors.UnsupportedEncodingError: _Row(415, "invalid_request_error", None, 415, "UnsupportedMediaTypeException"),
    errors.ModelNotFoundError: _Row(404, "invalid_request_error", "model_not_found", 404, "ModelNotFoundException"),
    errors.ObjectNotFoundError: _Row(404, "invalid_request_error", "not_found", 404, "ResourceNotFoundException"),
    errors.RouteNotFoundError: _Row(404, "invalid_request_error", "unknown_url", 404, "ResourceNotFoundException"),
    errors.MalformedUrlError: _Row(400, "invalid_request_error", "malformed_url", 409, "IllegalArgumentException"),
    errors.MethodNotAllowedError: _Row(
        405, "invalid_request_error", "method_not_supported", 405, "MethodNotAllowedException"
    ),
    errors.BadParameterError: _Row(400, "invalid_request_error", None, 400, "BadRequestException"),
    errors.ModelExistsError: _Row(409, "invalid_request_error", "model_exists", 409, "BadRequestException"),
    errors.AuthenticationError: _Row(401, "invalid_request_error", "invalid_api_key", 401, "UnauthorizedException"),
    errors.KeyBusyError: _Row(429, "requests", "rate_limit_exceeded", 429, "ThrottlingException"),
    errors.DeadlineError: _Row(504, "timeout_error", "deadline_exceeded", 504, "TimeoutException"),
    errors.PermissionDeniedError: _Row(403, "invalid_request_error", "forbidden", 403, "ForbiddenException"),
    errors.RequestError: _Row(400, "invalid_request_error", None, 424, "BadRequestException"),
    errors.NoRoomError: _Row(503, "service_unavailable_error", "no_room", 503, "WlmException"),
    errors.QueueFullError: _Row(503, "service_unavailable_error", "queue_full", 503, "WlmCapacityException"),
    errors.QueueDelayError: _Row(503, "service_unavailable_error", "queue_delay", 503, "WlmCapacityException"),
    errors.ModelNotReadyError: _Row(503, "service_unavailable_error", "model_not_ready", 503, "WlmException"),
    errors.WorkerDiedError: _Row(503, "service_unavailable_error", "worker_died", 503, "WlmException"),
    errors.AbortedError: _Row(503, "service_unavailable_error", "aborted", 503, "WlmException"),
    errors.UpstreamError: _Row(502, "server_error", "bad_gateway", 502, "WlmException"),
    errors.PredictTimeoutError: _Row(503, "service_unavailable_error", "predict_timeout", 503, "WlmException"),
    errors.ModelMemoryError: _Row(507, "server_error", "out_of_memory", 507, "WlmOutOfMemoryException"),
    errors.ModelLoadError: _Row(500, "server_error", "model_load_failed", 500, "EngineException"),
    errors.ConfigurationError: _Row(
        400, "invalid_request_error", "bad_configuration", 400, "IllegalConfigurationException"
    ),
    errors.HandlerError: _Row(500, "server_error", None, 424, "EngineException"),
    LmiServerError: _Row(500, "server_error", None, 500, "InternalServerException"),
}


def form_of(route: str) -> ErrorForm | None:
    """Return how errors of an optional dialect read, if `route` (an Input's route, or a path) belongs to one."""
    path = route.strip("/")
    dialects = optional_dialects()
    form = dialects.errors.get(path.removeprefix("v1/"))
    if form is not None or path == _RERANK:
        return form
    return dialects.errors_below.get(path.partition("/")[0])


def is_openai(route: str) -> bool:
    """Return whether `route` (an Input's route, or a path) belongs to OpenAI's API: everything else under /v1 does."""
    path = route.strip("/")
    if form_of(path) is not None:
        return False
    return path in OPENAI_ROUTES or path == "v1" or path.startswith("v1/")


def _row(error: LmiServerError) -> _Row:
    # LmiServerError itself has a row, so that a class without one is still an answer.
    return next(_ROWS[cls] for cls in type(error).__mro__ if cls in _ROWS)


def _openai_body(error: LmiServerError) -> dict[str, object]:
    row = _row(error)
    body = {"message": error.message, "type": row.openai_type, "param": None, "code": row.openai_code}
    if isinstance(error, errors.RouteNotFoundError):  # it is a path of neither API, so clients of both can read it
        return {**_lmi_body(error), "error": body}
    return {"error": body}


def _lmi_body(error: LmiServerError, status: int | None = None) -> dict[str, object]:
    row = _row(error)
    if isinstance(error, errors.HandlerError) and error.code is not None:
        return {"error": error.message, "code": error.code}
    # LMI's Java server writes `message` and its Python process `error`, so clients may read either.
    return {"code": status or row.lmi_status, "type": row.lmi_type, "message": error.message, "error": error.message}


def error_reply(
    route: str, error: LmiServerError, statuses: Mapping[type[LmiServerError], int] = {}, request_id: str = ""
) -> tuple[int, list[tuple[str, str]], bytes]:
    """Return status, headers and body of the answer to a request that fails before the first byte of an answer.

    `statuses` replace the usual statuses of some error classes. Errors of some dialects repeat the id of the request.
    """
    row = _row(error)
    status = statuses.get(type(error))
    headers = [("content-type", "application/json")]
    if error.retry_after is not None:
        headers.append(("retry-after", str(error.retry_after)))
    if isinstance(error, errors.AuthenticationError):
        headers.append(("www-authenticate", "Bearer"))
    if isinstance(error, errors.UnsupportedEncodingError):
        headers.append(("accept-encoding", "gzip, deflate"))
    form = form_of(route)
    if is_openai(route):
        return status or row.openai_status, headers, encode(_openai_body(error))
    if form is not None:
        status, body = form.write(error, status or row.openai_status, request_id)
        return status, headers, encode(body)
    return status or row.lmi_status, headers, encode(_lmi_body(error, status))


def error_event(route: str, content_type: str, error: LmiServerError, request_id: str = "") -> bytes:
    """Return the last bytes of a stream that fails after it began, in the framing of its content type.

    No `[DONE]` follows. OpenAI's SDK raises at the error event, and a client that reads raw bytes must not mistake the
    broken stream for a complete one.
    """
    form = form_of(route)
    if form is not None:
        body = form.write(error, _row(error).openai_status, request_id)[1]
        if form.event:
            return named_event(form.event, body)
    else:
        body = _openai_body(error) if is_openai(route) else _lmi_body(error)
    if content_type.startswith(SSE.content_type):
        return SSE.frame(body)
    if content_type.startswith(JSON_LINES.content_type):
        return JSON_LINES.frame(body)
    return encode(body)
