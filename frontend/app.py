"""The routes: inference goes to the relay at once, everything else through Starlette."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontend.access.management_access import Access, protect
from frontend.features import ServerParts, attach_features
from frontend.http.clients import Inference, Receive, Scope, Send, Target
from frontend.http.listeners import Place
from frontend.http.responses import error_response, json_response, on_http_error, on_lmi_error
from frontend.management.adapters import AdapterManagement
from frontend.management.model_list import ModelList
from frontend.management.models import Management
from frontend.observability.error_rates import ErrorRates
from frontend.observability.metrics.collector import PLAIN, Metrics
from frontend.observability.server_log import LogTail
from frontend.openapi.document import Document
from frontend.relay.relay import Relay
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.errors import LmiServerError, RouteNotFoundError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.dialects import routes
from lmi_server.dialects.forms import MAX_FIELDS, too_many_fields
from lmi_server.dialects.optional import optional_dialects
from lmi_server.serving.models.registry import ModelRegistry
from lmi_server.serving.pool_settings import ModelStatus

INFERENCE_PATHS = {
    "/invocations": routes.INVOCATIONS,
    "/v1/completions": routes.COMPLETIONS,
    "/v1/chat/completions": routes.CHAT_COMPLETIONS,
    "/invocations/v1/chat/completions": routes.CHAT_COMPLETIONS,  # clients that have /invocations as their address
    "/v1/responses": routes.RESPONSES,
    "/v1/embeddings": routes.EMBEDDINGS,
    "/v1/images/generations": routes.IMAGES_GENERATIONS,
    "/v1/images/edits": routes.IMAGES_EDITS,
    "/v1/images/variations": routes.IMAGES_VARIATIONS,
    "/score": routes.SCORE,
    "/v1/score": routes.SCORE,
    "/rerank": routes.RERANK,
    "/v1/rerank": routes.RERANK,
    "/v2/rerank": routes.RERANK,
    "/tokenize": routes.TOKENIZE,
    "/detokenize": routes.DETOKENIZE,
}
_WITH_MODEL = {
    "/predictions/{model}": routes.PREDICTIONS,
    "/predictions/{model}/{version}": routes.PREDICTIONS,
    "/models/{model}/invoke": routes.INVOCATIONS,
    "/models/{model}/{version}/invoke": routes.INVOCATIONS,
}
"""Paths for inference that name the model, each with its route, as `_target` reads them."""
_FROM_BEST = list(ModelStatus)
_ANY_METHOD = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


class App:
    """The ASGI application.

    If `management_place` is given, models are managed there and requests are served elsewhere, and only the health
    checks are on both. Further routes and paths for inference are those of the features.
    """

    def __init__(
        self,
        models: ModelRegistry,
        metrics: Metrics,
        relay: Relay,
        settings: ServerSettings,
        access: Access,
        log_tail: LogTail,
        management_place: Place | None = None,
    ) -> None:
        self._models = models
        self._relay = relay
        self._management_place = management_place
        self._takes_preflights = settings.cors_allowed_origin is not None
        check = _check_of_requests(access)
        self.features = attach_features(
            ServerParts(models, metrics, relay, settings, access, log_tail, self._answer, check)
        )
        self._infer: Inference = relay if access.keys is None else access.keys.protect(relay, relay.refuse)
        for feature in self.features:
            self._infer = feature.wrap(self._infer)
        self._exact = {**INFERENCE_PATHS, **optional_dialects().paths}
        self._targets = [item for feature in self.features for item in feature.targets.items()]
        self._takers = [item for feature in self.features for item in feature.takers.items()]
        self._management_takers = {
            path: taker for feature in self.features for path, taker in feature.management_takers.items()
        }
        self._route(StatusEndpoints(models, metrics, relay.error_rates, settings), access, check)

    def _route(self, status: StatusEndpoints, access: Access, check: Callable[[Scope], object] | None) -> None:
        features, models = self.features, self._models
        health = [*_health(status), *(route for feature in features for route in feature.health_routes())]
        requests = [
            *_request_routes(status, models, self._exact),
            *(route for feature in features for route in feature.request_routes()),
        ]
        managing = [
            *_managing_routes(status, models, access),
            *(route for feature in features for route in feature.management_routes()),
        ]
        if check is not None:
            requests = protect(requests, check)
        inference = {**self._exact, **_WITH_MODEL}
        answer_types: dict[str, str] = {}
        for feature in features:
            inference.update(feature.paths)
            answer_types.update(feature.answer_types)
        if self._management_place is None:
            self._routes = _application([*health, *requests, *managing], inference, answer_types)
        else:
            self._routes = _application([*health, *requests], inference, answer_types)
            self._management = _application([*health, *managing], {}, {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "*":  # OPTIONS * asks about the server as a whole
            path = scope["path"] = "/"
        elif path.endswith("/"):
            path = scope["path"] = path.rstrip("/") or "/"
        apart = self._management_place
        if apart is None or apart.accepts(scope["server"]):
            taker = self._management_takers.get(path)
            if taker is not None and await taker(scope, receive, send):
                return
            if apart is not None:
                await self._answer(self._management, scope, receive, send)
                return
        # Most requests are for inference. This look-up is far cheaper than Starlette's list of regular expressions, and
        # than the layers that Starlette puts around an endpoint.
        target = self._target(path, scope["method"])
        if target is None:
            await self._answer_other(path, scope, receive, send)
        elif scope["method"] == "OPTIONS":
            await self._answer(self._options(target), scope, receive, send)
        else:
            await self._infer(target, scope, receive, send)

    async def _answer_other(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is not for inference."""
        for beginning, taker in self._takers:
            if path.startswith(beginning) and await taker(scope, receive, send):
                return
        preflight = self._takes_preflights and _is_preflight(scope)
        await self._answer(json_response({}) if preflight else self._routes, scope, receive, send)

    def drain(self) -> None:
        """Begin to end."""
        for feature in self.features:
            feature.drain()

    async def finish(self) -> None:
        """Wait until the requests that run without a client have ended, and their answers are stored."""
        await asyncio.gather(*(feature.finish() for feature in self.features))

    def give_up(self) -> None:
        """Log which answers are not stored."""
        for feature in self.features:
            feature.give_up()

    def _target(self, path: str, method: str) -> Target | None:
        """Return where an inference request goes, None if the path is not for inference.

        LMI's paths take any method, all others only POST (and OPTIONS).
        """
        route = self._exact.get(path)
        if route is not None:
            return (route, None, None) if method in ("POST", "OPTIONS") or route == routes.INVOCATIONS else None
        if path.startswith("/predictions/"):
            _, _, name, *rest = path.split("/")
            return routes.PREDICTIONS, name, rest[0] if rest else None
        if path.startswith("/models/") and path.endswith("/invoke"):
            _, _, name, *rest = path.split("/")
            return (routes.INVOCATIONS, name, self._version_of(name, rest[0])) if rest else None
        for beginning, target in self._targets:
            if path.startswith(beginning):
                return target(path) if method in ("POST", "OPTIONS") else None
        return None

    def _version_of(self, name: str, text: str) -> str | None:
        """Return the version that /models/NAME/VERSION/invoke means. LMI ignores what is no version of the model."""
        models = [model for endpoint in self._models.endpoints if endpoint.name == name for model in endpoint.models]
        return text if any(model.version == text for model in models) else None

    def _options(self, target: Target) -> Response:
        """Answer whether the model of an inference path exists."""
        _, name, version = target
        try:
            if name is not None:
                self._models.find(name, version)
        except LmiServerError as error:
            return error_response("", error)
        return json_response({})

    async def _answer(self, application: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a Starlette application or response, and add the headers that every answer has."""
        if scope["query_string"].count(b"&") >= MAX_FIELDS:
            application = error_response(scope["path"], too_many_fields())
        request_id = self._relay.request_id(scope).encode("latin-1")

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id), *self._relay.headers]
            await send(message)

        await application(scope, receive, send_with_headers)


def _check_of_requests(access: Access) -> Callable[[Scope], object] | None:
    """Return the check that raises an LmiServerError for a client, or a web page, without access to the models."""
    if access.keys is not None:
        return access.keys.check
    return None if access.pages is None else access.pages.check_scope


def _is_preflight(scope: Scope) -> bool:
    """Return whether a browser asks which requests pages of another origin may send."""
    return scope["method"] == "OPTIONS" and any(key == b"access-control-request-method" for key, _ in scope["headers"])


class StatusEndpoints:
    """Health, metrics and the list of models."""

    def __init__(
        self, models: ModelRegistry, metrics: Metrics, error_rates: ErrorRates, settings: ServerSettings
    ) -> None:
        self._models = models
        self._metrics = metrics
        self._error_rates = error_rates
        self._multi_status = settings.allow_multi_status
        self._ping_codes = _ping_codes(settings)

    async def ping(self, request: Request) -> Response:
        """Return every model's status in LMI's form; the code depends on the models of the start alone."""
        statuses = {endpoint.name: endpoint.status for endpoint in self._models.endpoints}
        body = {name: {"status": status.value} for name, status in statuses.items()}
        several = self._multi_status and len(set(statuses.values())) > 1 and ModelStatus.HEALTHY in statuses.values()
        return json_response(body, 503 if self._error_rates.exceeded else self._ping_code(several))

    def _ping_code(self, several: bool) -> int:
        """Return the code for the model of the start that is worst off.

        `several` asks for 207 unless one has failed. Models that are registered later do not change the code: the
        answer of their registration says how they are.
        """
        worst = max(self._models.startup_statuses, key=_FROM_BEST.index, default=ModelStatus.HEALTHY)
        return 207 if several and worst is not ModelStatus.FAILED else self._ping_codes[worst]

    async def live(self, request: Request) -> Response:
        """Return 500 if every model of the start has failed for good, so that only a new process helps; else 200."""
        failed = self._models.startup_statuses == {ModelStatus.FAILED}
        return json_response({"status": "FAILED" if failed else "live"}, 500 if failed else 200)

    async def ready(self, request: Request) -> Response:
        """Return 200 if every model of the start can serve now; 503 if one loads, is restarted or has failed."""
        ready = self._models.startup_statuses <= {ModelStatus.HEALTHY}
        return json_response({"status": "ready" if ready else "not ready"}, 200 if ready else 503)

    async def proxy(self, request: Request) -> Response:
        """Return what a proxy of Ray Serve answers: "success" if every model of the start can serve now, else 503."""
        ready = self._models.startup_statuses <= {ModelStatus.HEALTHY}
        return Response("success" if ready else "not ready", 200 if ready else 503, media_type="text/plain")

    async def version(self, request: Request) -> Response:
        """Return the version of the server, as vLLM does."""
        return json_response({"version": version("lmi-server")})

    async def metrics(self, request: Request) -> Response:
        """Return all metrics, or only those of the parameters `name[]`; as OpenMetrics if Accept names it."""
        names = request.query_params.getlist("name[]")
        text, content_type = await self._metrics.exposition(request.headers.get("accept", PLAIN), names)
        return Response(text, headers={"content-type": content_type})

    async def root(self, request: Request) -> Response:
        """Answer OPTIONS, which asks about the server as a whole; LMI has nothing else at this path."""
        if request.method != "OPTIONS":
            raise RouteNotFoundError(f"Requested resource is not found: {excerpt(request.url.path)}")
        return json_response({})


def _health(status: StatusEndpoints) -> list[Route]:
    """Return the routes of the health checks. As in LMI, /ping takes any method, and any path behind it."""
    return [
        Route("/ping", status.ping, methods=_ANY_METHOD),
        Route("/ping/{ignored:path}", status.ping, methods=_ANY_METHOD, include_in_schema=False),
        Route("/health", status.ready),  # that of text-generation-inference and vLLM
        Route("/health/live", status.live),
        Route("/health/ready", status.ready),
        Route("/-/healthz", status.proxy),  # by which KubeRay finds the pods that serve
    ]


def _request_routes(status: StatusEndpoints, models: ModelRegistry, inference: Iterable[str]) -> list[Route]:
    listed = ModelList(models)
    return [
        Route("/version", status.version),
        Route("/v1/models", listed.models),
        Route("/v1/models/{model:path}", listed.model),
        Route("/", status.root, methods=_ANY_METHOD, include_in_schema=False),
        # Only other methods than these get here, and are refused.
        *(Route(path, status.root, methods=["POST", "OPTIONS"], include_in_schema=False) for path in inference),
    ]


def _managing_routes(status: StatusEndpoints, models: ModelRegistry, access: Access) -> list[Route]:
    managing = [*AdapterManagement(models, access.limits).routes(), *Management(models, access.limits).routes()]
    # Prometheus is on another machine; /server/metrics is the path in LMI.
    metrics = [Route("/metrics", status.metrics), Route("/server/metrics", status.metrics)]
    return [*protect(metrics, access.guard.check_reader), *protect(managing, access.guard.check)]


def _application(routes: list[Route], inference: Mapping[str, str], answer_types: Mapping[str, str]) -> Starlette:
    """Return the application with `routes`, and with the document about them and the paths of `inference`."""
    starlette = Starlette(
        routes=Document(routes, inference, answer_types).routes,
        exception_handlers={HTTPException: on_http_error, LmiServerError: on_lmi_error},
    )
    starlette.router.redirect_slashes = False  # many clients do not follow a redirect of a POST
    return starlette


def _ping_codes(settings: ServerSettings) -> dict[ModelStatus, int]:
    """Return the code of /ping by the status of a model.

    A model whose workers are restarted counts as 200 by default, as it does in LMI: a platform that takes anything else
    for a reason to end the server would end it while it recovers.
    """
    return {
        ModelStatus.HEALTHY: 200,
        ModelStatus.UNHEALTHY: settings.ping_restarting_http_code,
        ModelStatus.PENDING: settings.ping_loading_http_code,
        ModelStatus.FAILED: settings.ping_failed_http_code,
    }
