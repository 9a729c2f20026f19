"""The routes: inference goes to the relay at once, everything else through Starlette."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, MutableMapping
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontend.access.management_access import Access, protected
from frontend.console.pages import CHAT, Console, is_for_people, to_console
from frontend.http.clients import Receive, Scope, Send
from frontend.http.listeners import Place
from frontend.http.responses import error_response, json_response, on_http_error, on_lmi_error
from frontend.kserve import predictions as kserve
from frontend.management.adapters import AdapterManagement
from frontend.management.model_list import ModelList, place_of
from frontend.management.models import Management
from frontend.observability.error_rates import ErrorRates
from frontend.observability.metrics.collector import PLAIN, Metrics
from frontend.openapi.document import Document
from frontend.relay.relay import Relay
from frontend.sagemaker.async_invocations import AsyncInvocations
from frontend.sagemaker.async_jobs import AsyncJobs
from frontend.sagemaker.detached import memory_for_answers
from frontend.sagemaker.request_signatures import SignatureCheck
from frontend.sagemaker.runtime import ENDPOINTS, SageMakerRuntime
from frontend.sagemaker.runtime import PATHS as SAGEMAKER_PATHS
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.errors import BadParameterError, LmiServerError, RouteNotFoundError
from lmi_server.contract.quoting import excerpt
from lmi_server.dialects import routes
from lmi_server.dialects.forms import MAX_FIELDS, too_many_fields
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.registry import ModelRegistry
from lmi_server.serving.pool_settings import ModelStatus

_EXACT = {
    "/invocations": routes.INVOCATIONS,
    "/v1/completions": routes.COMPLETIONS,
    "/v1/chat/completions": routes.CHAT_COMPLETIONS,
    "/invocations/v1/chat/completions": routes.CHAT_COMPLETIONS,  # clients that have /invocations as their address
    "/v1/responses": routes.RESPONSES,
    "/v1/messages": routes.MESSAGES,
    "/v1/messages/count_tokens": routes.COUNT_TOKENS,
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
    "/": routes.TGI,
    "/generate": routes.GENERATE,
    "/generate_stream": routes.GENERATE_STREAM,
}
# Every path for inference, each with its route; those that are not exact are read in `_target`.
_INFERENCE = {
    **_EXACT,
    "/predictions/{model}": routes.PREDICTIONS,
    "/predictions/{model}/{version}": routes.PREDICTIONS,
    "/models/{model}/invoke": routes.INVOCATIONS,
    "/models/{model}/{version}/invoke": routes.INVOCATIONS,
    **kserve.PATHS,
    **SAGEMAKER_PATHS,
}
_FROM_BEST = list(ModelStatus)
_ANY_METHOD = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")

Target = tuple[str, str | None, str | None]
"""Where an inference request goes: its route, and the name and version of the model if the path has them."""


class App:
    """The ASGI application.

    If `management_place` is given, models are managed there and requests are served elsewhere, and only the health
    checks are on both. `console` is on the address for management; None if it is
    switched off.
    """

    def __init__(
        self,
        models: ModelRegistry,
        metrics: Metrics,
        relay: Relay,
        settings: ServerSettings,
        access: Access,
        management_place: Place | None = None,
        console: Console | None = None,
    ) -> None:
        self._models = models
        self._relay = relay
        self._console = console
        self._management_place = management_place
        self._takes_preflights = settings.cors_allowed_origin is not None
        status = StatusEndpoints(models, metrics, relay.error_rates, settings)
        keys = access.keys
        infer = relay if keys is None else keys.protect(relay, relay.refuse)
        check = _check_of_requests(access)
        answers = memory_for_answers(settings)
        self._infer = AsyncJobs(infer, self._answer, check, settings, answers)
        self._invocations = AsyncInvocations(infer, check, settings, answers)
        self._sagemaker = SageMakerRuntime(models, self._infer, self._invocations, self._answer, _signatures(settings))
        serving, managing = _serving_routes(status, models), _managing_routes(status, models, access)
        managing += [] if console is None else console.routes()
        if check is not None:
            serving = protected(serving, check)
        if management_place is None:
            self._routes = _application([*_health(status, models), *serving, *managing], _INFERENCE)
        else:
            self._routes = _application([*_health(status, models), *serving], _INFERENCE)
            self._management = _application([*_health(status, models), *managing], {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "*":  # OPTIONS * asks about the server as a whole
            scope["path"] = "/"
        elif path.endswith("/"):
            scope["path"] = path.rstrip("/") or "/"
        apart = self._management_place
        manages = apart is None or apart.accepts(scope["server"])
        if manages and self._console is not None:
            if scope["path"] == CHAT and scope["method"] == "POST":
                await self._console.chat(scope, receive, send)
                return
            if is_for_people(scope):
                await self._answer(to_console(), scope, receive, send)
                return
        if manages and apart is not None:
            await self._answer(self._management, scope, receive, send)
            return
        # Most requests are for inference. This look-up is far cheaper than Starlette's list of regular expressions, and
        # than the layers that Starlette puts around an endpoint.
        target = self._target(scope["path"], scope["method"])
        if target is None:
            if path.startswith(ENDPOINTS) and await self._sagemaker(scope, receive, send):
                return
            preflight = self._takes_preflights and _is_preflight(scope)
            await self._answer(json_response({}) if preflight else self._routes, scope, receive, send)
        elif scope["method"] == "OPTIONS":
            await self._answer(self._options(target), scope, receive, send)
        else:
            await self._infer(*target, scope, receive, send)

    def drain(self) -> None:
        """Begin to end: the pages of the console get no more events, and what waits for a queue fails."""
        if self._console is not None:
            self._console.close()
        self._invocations.drain()

    async def finish(self) -> None:
        """Wait until the requests that run without a client have ended, and their answers are stored."""
        await asyncio.gather(self._infer.finish(), self._invocations.finish())

    def give_up(self) -> None:
        """Log which answers are not stored."""
        self._infer.give_up()
        self._invocations.give_up()

    def _target(self, path: str, method: str) -> Target | None:
        """Return where an inference request goes, None if the path is not for inference.

        LMI's paths take any method, those of OpenAI and vLLM only POST (and OPTIONS).
        """
        route = _EXACT.get(path)
        if route is not None:
            return (route, None, None) if method in ("POST", "OPTIONS") or route == routes.INVOCATIONS else None
        if path.startswith("/predictions/"):
            _, _, name, *rest = path.split("/")
            return routes.PREDICTIONS, name, rest[0] if rest else None
        if path.startswith(kserve.MODELS):
            return kserve.target(path) if method in ("POST", "OPTIONS") else None
        if path.startswith("/models/") and path.endswith("/invoke"):
            _, _, name, *rest = path.split("/")
            return (routes.INVOCATIONS, name, self._version_of(name, rest[0])) if rest else None
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
                self._models.named(name, version)
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
    """Return what raises an LmiServerError for a request of a client, or of a web page, that may not use the models."""
    if access.keys is not None:
        return access.keys.check
    return None if access.pages is None else access.pages.check_scope


def _signatures(settings: ServerSettings) -> SignatureCheck | None:
    if settings.sigv4_keys is None:
        return None
    return SignatureCheck(settings.sigv4_keys, settings.sigv4_region, settings.max_request_size)


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

        `several` asks for 207 unless one has failed. Models that are registered later do not change the code: whoever
        registers them gets the answer of the registration.
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

    async def info(self, request: Request) -> Response:
        """Return text-generation-inference's description of the model; `model_name` chooses one of several."""
        name = request.query_params.get("model_name")
        endpoint = self._models.default if name is None else self._models.endpoint(name)
        if endpoint is None:
            self._models.refuse_if_untold()
            raise BadParameterError("Parameter model_name is required.")
        return json_response(_tgi_info(endpoint.name, endpoint.choose(None), request.scope))

    async def version(self, request: Request) -> Response:
        """Return the version of the server, as vLLM does."""
        return json_response({"version": version("lmi-server")})

    async def metrics(self, request: Request) -> Response:
        """Return all metrics, or only those that the parameters `name[]` name; as OpenMetrics if Accept names it."""
        names = request.query_params.getlist("name[]")
        text, content_type = await self._metrics.exposition(request.headers.get("accept", PLAIN), names)
        return Response(text, headers={"content-type": content_type})

    async def root(self, request: Request) -> Response:
        """Answer OPTIONS, which asks about the server as a whole; LMI has nothing else at this path."""
        if request.method != "OPTIONS":
            raise RouteNotFoundError(f"Requested resource is not found: {excerpt(request.url.path)}")
        return json_response({})


def _health(status: StatusEndpoints, models: ModelRegistry) -> list[Route]:
    """Return the routes of the health checks. As in LMI, /ping takes any method, and any path behind it."""
    return [
        Route("/ping", status.ping, methods=_ANY_METHOD),
        Route("/ping/{ignored:path}", status.ping, methods=_ANY_METHOD, include_in_schema=False),
        Route("/health", status.ready),  # that of text-generation-inference and vLLM
        Route("/health/live", status.live),
        Route("/health/ready", status.ready),
        Route("/-/healthz", status.proxy),  # by which KubeRay finds the pods that serve
        *kserve.KServeEndpoints(models).health(),
    ]


def _serving_routes(status: StatusEndpoints, models: ModelRegistry) -> list[Route]:
    listed = ModelList(models)
    return [
        Route("/info", status.info),
        Route("/version", status.version),
        Route("/v1/models", listed.models),
        *kserve.KServeEndpoints(models).routes(),
        Route("/v1/models/{model:path}", listed.model),
        Route("/", status.root, methods=_ANY_METHOD, include_in_schema=False),
        # Only other methods than these get here, and are refused.
        *(Route(path, status.root, methods=["POST", "OPTIONS"], include_in_schema=False) for path in _EXACT),
    ]


def _managing_routes(status: StatusEndpoints, models: ModelRegistry, access: Access) -> list[Route]:
    managing = [*AdapterManagement(models, access.limits).routes(), *Management(models, access.limits).routes()]
    # Prometheus is on another machine; /server/metrics is the path in LMI.
    metrics = [Route("/metrics", status.metrics), Route("/server/metrics", status.metrics)]
    return [*protected(metrics, access.guard.check_reader), *protected(managing, access.guard.check)]


def _application(routes: list[Route], inference: Mapping[str, str]) -> Starlette:
    """Return the application with `routes`, and with the document about them and the paths of `inference`."""
    starlette = Starlette(
        routes=Document(routes, inference).routes,
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


def _tgi_info(name: str, model: Model, scope: Scope) -> dict[str, Any]:
    """Return what text-generation-inference's clients read in /info; lengths once the model has loaded."""
    longest = None if model.pool is None else model.pool.max_model_len or None
    return {
        "model_id": place_of(name, model, scope),
        "model_sha": None,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": None if model.resolved is None else model.resolved.serving.job_queue_size,
        "max_input_tokens": None if longest is None else longest - 1,
        "max_total_tokens": longest,
        "max_client_batch_size": 1,
        "router": "lmi-server",
        "version": version("lmi-server"),
    }
