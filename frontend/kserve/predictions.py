"""The paths of the Open Inference Protocol (KServe v2, Triton): health, metadata, and where inference requests go.

The sources are inference_rest.md of kserve/open-inference-protocol, and Triton's extensions for generating text and for
the index of models.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontend.features import ServerFeature, ServerParts
from frontend.http.clients import Scope, Target, shown_error
from frontend.http.responses import error_response, json_response
from lmi_server.configuration.handlers import HandlerSpec
from lmi_server.contract.errors import MethodNotAllowedError
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.dialects.kserve import route_names
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.registry import ModelRegistry
from lmi_server.serving.pool_settings import ModelStatus

MODELS = "/v2/models/"
_ACTIONS = {
    "infer": route_names.INFER,
    "generate": route_names.V2_GENERATE,
    "generate_stream": route_names.V2_GENERATE_STREAM,
}
PATHS = {
    f"{MODELS}{{model}}{number}/{action}": route
    for number in ("", "/versions/{version}")
    for action, route in _ACTIONS.items()
}
"""The paths for inference, each with its route."""

_STATES = {ModelStatus.HEALTHY: "READY", ModelStatus.PENDING: "LOADING"}
_NOT_READY = 400  # the protocol asks for a status of 4xx


def target(path: str) -> Target | None:
    """Return route, model and version of a path below /v2/models/; None if it is not for inference."""
    match path.removeprefix(MODELS).split("/"):
        case [name, "versions", number, action] if action in _ACTIONS:
            return _ACTIONS[action], name, number
        case [name, action] if action in _ACTIONS:
            return _ACTIONS[action], name, None
    return None


def attach(server: ServerParts) -> ServerFeature:
    """Return the feature, which every server has."""
    return KServeEndpoints(server.models)


class KServeEndpoints(ServerFeature):
    """Health and metadata of the server and of its models."""

    paths = PATHS

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models
        self.targets = {MODELS: target}

    def health_routes(self) -> list[Route]:
        return [Route("/v2/health/live", self.live), Route("/v2/health/ready", self.ready)]

    def request_routes(self) -> list[Route]:
        model = "/v2/models/{model}"
        return [
            Route("/v2", self.server),
            Route("/v2/repository/index", self.index, methods=["POST"]),
            *(Route(path, self.model) for path in (model, f"{model}/versions/{{version}}")),
            *(Route(f"{path}/ready", self.model_ready) for path in (model, f"{model}/versions/{{version}}")),
            # Only other methods than POST get here, and are refused.
            *(Route(path, self.refuse_method, methods=["POST"], include_in_schema=False) for path in PATHS),
        ]

    async def server(self, request: Request) -> Response:
        """Return name, version and extensions of the server."""
        extensions = ["binary_tensor_data", "generate", "model_repository"]
        return json_response({"name": "lmi-server", "version": version("lmi-server"), "extensions": extensions})

    async def live(self, request: Request) -> Response:
        """Return 200 while the server runs."""
        return json_response({"live": True})

    async def ready(self, request: Request) -> Response:
        """Return 200 if every model of the start can serve."""
        ready = self._models.startup_statuses <= {ModelStatus.HEALTHY}
        return json_response({"ready": ready}, 200 if ready else _NOT_READY)

    async def model(self, request: Request) -> Response:
        """Return versions, inputs and outputs of a model."""
        return json_response(self._metadata(self._find(request)))

    async def model_ready(self, request: Request) -> Response:
        """Return 200 if the model can serve."""
        model = self._find(request)
        ready = model.status is ModelStatus.HEALTHY
        return json_response({"name": model.name, "ready": ready}, 200 if ready else _NOT_READY)

    async def index(self, request: Request) -> Response:
        """Return every version of every model with its state, as Triton's extension for repositories."""
        return json_response([_index_entry(model, request.scope) for model in self._models.models])

    async def refuse_method(self, request: Request) -> Response:
        path = request.url.path
        return error_response(
            path, MethodNotAllowedError(f"{excerpt(request.method)} is not allowed on {excerpt(path)}; use POST")
        )

    def _find(self, request: Request) -> Model:
        return self._models.find(request.path_params["model"], request.path_params.get("version"))

    def _metadata(self, model: Model) -> dict[str, Any]:
        versions = [one.version for one in self._models.endpoint(model.name).models if one.version is not None]
        spec = None if model.resolved is None else model.resolved.spec
        inputs, outputs = ([], []) if spec is None else _tensors(spec)
        return {
            "name": model.name,
            "versions": versions,
            "platform": "" if spec is None else f"lmi-server {spec.title}",
            "inputs": inputs,
            "outputs": outputs,
        }


def _tensors(spec: HandlerSpec) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return inputs and outputs as far as they are the same for every model of a handler; none for a user's code."""
    if spec.runs_user_code:
        return [], []
    if spec.formats_text:
        return [_describe("text_input", "BYTES", 1)], [_describe("text_output", "BYTES", 1)]
    if spec.reads_checkpoint:
        return [_describe("input", "BYTES", 1)], []  # the task says what comes back
    return [_describe("input", "FP32", 2)], []


def _describe(name: str, datatype: str, dimensions: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [-1] * dimensions}


def _index_entry(model: Model, scope: Scope) -> dict[str, Any]:
    reason = "" if model.failure is None else shown_error(model.failure, scope).message
    state = _STATES.get(model.status, "UNAVAILABLE")
    return {"name": model.name, "version": model.version or "", "state": state, "reason": reason}
