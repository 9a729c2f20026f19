"""Answers of the server itself: indented JSON, as LMI writes it, errors in the form of the route; ids of requests."""

from __future__ import annotations

import os
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from frontend.http.clients import shown_error
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.errors import (
    BadParameterError,
    LmiServerError,
    MethodNotAllowedError,
    ModelNotReadyError,
    NoRoomError,
    PredictTimeoutError,
    QueueDelayError,
    QueueFullError,
    RouteNotFoundError,
    WorkerDiedError,
)
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.contract.texts.sendable import json_bytes
from lmi_server.dialects.errors import error_reply

CACHE_HEADERS = [
    (b"pragma", b"no-cache"),
    (b"cache-control", b"no-cache; no-store, must-revalidate, private"),
    (b"expires", b"Thu, 01 Jan 1970 00:00:00 UTC"),
]
"""What DJL Serving adds to every answer, beside the id of the request."""
_VARIANTS = "89ab"


def standard_headers(settings: ServerSettings) -> list[tuple[bytes, bytes]]:
    """Return what is added to every answer beside the id of the request: no caching, and CORS where it is set."""
    cors = {
        b"access-control-allow-origin": settings.cors_allowed_origin,
        b"access-control-allow-methods": settings.cors_allowed_methods,
        b"access-control-allow-headers": settings.cors_allowed_headers,
    }
    return [*CACHE_HEADERS, *((name, value.encode("ascii")) for name, value in cors.items() if value is not None)]


def error_statuses(settings: ServerSettings) -> dict[type[LmiServerError], int]:
    """Return the statuses that the settings give to errors of inference requests."""
    wlm = settings.wlm_error_http_code
    return {
        QueueFullError: settings.throttle_error_http_code,
        QueueDelayError: settings.throttle_error_http_code,
        NoRoomError: wlm,
        ModelNotReadyError: wlm,
        WorkerDiedError: wlm,
        PredictTimeoutError: wlm,
        BadParameterError: settings.bad_request_http_code,
    }


def json_response(value: Any, status: int = 200) -> Response:
    body = msgspec.json.format(json_bytes(value), indent=2) + b"\n"
    return Response(body, status, media_type="application/json")


def error_response(route: str, error: LmiServerError, more_headers: dict[str, str] | None = None) -> Response:
    status, headers, body = error_reply(route, error)
    return Response(body, status, {**dict(headers), **(more_headers or {})})


async def on_http_error(request: Request, raised: Exception) -> Response:
    """Answer a request that Starlette's router refuses: an unknown path, or a method that the path does not take."""
    assert isinstance(raised, HTTPException)
    path = request.url.path
    if raised.status_code == 404:
        return error_response(path, RouteNotFoundError(f"Requested resource is not found: {excerpt(path)}"))
    allowed = ", ".join(sorted((raised.headers or {}).get("Allow", "").split(", ")))
    error = MethodNotAllowedError(f"{excerpt(request.method)} is not allowed on {excerpt(path)}; use {allowed}")
    return error_response(path, error, {"allow": allowed})


async def on_lmi_error(request: Request, raised: Exception) -> Response:
    assert isinstance(raised, LmiServerError)
    return error_response(request.url.path, shown_error(raised, request.scope))


def new_request_id() -> str:
    """Return the text of a random UUID (version 4, RFC 9562).

    Every request needs one, and `uuid.uuid4` takes twice as long: it makes an object first.
    """
    digits = os.urandom(16).hex()
    variant = _VARIANTS[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
