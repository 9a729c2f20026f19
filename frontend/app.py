"""The routes: inference goes to the relay at once, everything else through Starlette."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontend.inference import Receive, Relay, Scope, Send
from frontend.metrics import Metrics
from frontend.models import ServedModels
from lmi_server.dialects.errors import error_reply
from lmi_server.errors import LmiServerError, MethodNotAllowedError, ModelNotFoundError, RouteNotFoundError
from lmi_server.worker_pool import ModelStatus

_EXACT = {
    "/invocations": "invocations",
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat/completions",
}
_WITH_MODEL = ("/predictions/{model}", "/predictions/{model}/{version}", "/models/{model}/invoke")

_PING_CODES = {
    ModelStatus.FAILED: 500,
    ModelStatus.PENDING: 503,
    ModelStatus.UNHEALTHY: 503,
    ModelStatus.HEALTHY: 200,
}


class App:
    """The ASGI application."""

    def __init__(self, models: ServedModels, metrics: Metrics, relay: Relay) -> None:
        self._relay = relay
        self._cold = _cold_routes(models, metrics, relay)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "*":  # OPTIONS * asks about the server as a whole
            scope["path"] = "/"
        elif path.endswith("/") and path != "/":
            scope["path"] = path[:-1]
        if scope["method"] == "POST":
            route = _EXACT.get(scope["path"])
            if route is not None:
                await self._relay(route, None, scope, receive, send)
                return
        await self._cold(scope, cast(Any, receive), cast(Any, send))


class _Inference:
    """An inference path: POST runs it, OPTIONS tells that it is there."""

    def __init__(self, route: str, models: ServedModels, relay: Relay) -> None:
        self._route = route
        self._models = models
        self._relay = relay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = scope["path_params"].get("model")
        if scope["method"] == "POST":
            await self._relay(self._route, model, scope, receive, send)
            return
        await self._options(model)(cast(Any, scope), cast(Any, receive), cast(Any, send))

    def _options(self, model: str | None) -> Response:
        try:
            if model is not None:
                self._models.named(model)
        except ModelNotFoundError as error:
            return _error("", error)
        return _json({})


class _Cold:
    """What is asked now and then: health, metrics, the list of models."""

    def __init__(self, models: ServedModels, metrics: Metrics) -> None:
        self._models = models
        self._metrics = metrics

    async def ping(self, request: Request) -> Response:
        """200 only while every model can serve; the body is LMI's."""
        statuses = {pool.name: pool.status for pool in self._models.pools}
        code = max((_PING_CODES[status] for status in statuses.values()), default=200)
        if ModelStatus.FAILED in statuses.values():
            code = _PING_CODES[ModelStatus.FAILED]
        return _json({name: {"status": status.value} for name, status in statuses.items()}, code)

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        """OpenAI's list of models."""
        names = self._models.names
        return _json({"object": "list", "data": [_model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._models.named(name)
        return _json(_model(name))

    async def root_options(self, request: Request) -> Response:
        return _json({})


def _cold_routes(models: ServedModels, metrics: Metrics, relay: Relay) -> Starlette:
    cold = _Cold(models, metrics)
    paths = [*_EXACT.items(), *((path, "predictions") for path in _WITH_MODEL)]
    inference = [
        Route(path, cast(Any, _Inference(route, models, relay)), methods=["POST", "OPTIONS"]) for path, route in paths
    ]
    starlette = Starlette(
        routes=[
            Route("/ping", cold.ping),
            Route("/metrics", cold.metrics),
            Route("/v1/models", cold.models),
            Route("/v1/models/{model:path}", cold.model),
            Route("/", cold.root_options, methods=["OPTIONS"]),
            *inference,
        ],
        exception_handlers={HTTPException: _http_error, LmiServerError: _lmi_error},
    )
    starlette.router.redirect_slashes = False  # many clients do not follow a redirect of a POST
    return starlette


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "lmi-server"}


def _json(value: Any, status: int = 200) -> Response:
    body = msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    return Response(body, status, media_type="application/json")


async def _http_error(request: Request, raised: Exception) -> Response:
    assert isinstance(raised, HTTPException)
    path = request.url.path
    if raised.status_code == 404:
        return _error(path, RouteNotFoundError(f"Requested resource is not found: {path}"))
    allowed = ", ".join(sorted((raised.headers or {}).get("Allow", "").split(", ")))
    error = MethodNotAllowedError(f"{request.method} is not allowed on {path}; use {allowed}")
    return _error(path, error, {"allow": allowed})


async def _lmi_error(request: Request, raised: Exception) -> Response:
    assert isinstance(raised, LmiServerError)
    return _error(request.url.path, raised)


def _error(route: str, error: LmiServerError, more_headers: dict[str, str] | None = None) -> Response:
    status, headers, body = error_reply(route, error)
    return Response(body, status, {**dict(headers), **(more_headers or {})})
