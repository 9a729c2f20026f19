"""/info, where text-generation-inference describes its model. Its paths for inference are those of its dialect."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontend.features import ServerFeature, ServerParts
from frontend.http.clients import Scope
from frontend.http.responses import json_response
from frontend.management.model_list import place_of
from lmi_server.contract.errors import BadParameterError
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.registry import ModelRegistry


def attach(server: ServerParts) -> ServerFeature:
    """Return the feature, which every server has."""
    return TgiInfo(server.models)


class TgiInfo(ServerFeature):
    """Answers /info."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    def request_routes(self) -> list[Route]:
        return [Route("/info", self.info)]

    async def info(self, request: Request) -> Response:
        """Return text-generation-inference's description of the model; `model_name` chooses one of several."""
        name = request.query_params.get("model_name")
        endpoint = self._models.default if name is None else self._models.endpoint(name)
        if endpoint is None:
            self._models.refuse_if_untold()
            raise BadParameterError("Parameter model_name is required.")
        return json_response(_info(endpoint.name, endpoint.choose(None), request.scope))


def _info(name: str, model: Model, scope: Scope) -> dict[str, Any]:
    """Return what text-generation-inference's clients read; lengths once the model has loaded."""
    longest = None if model.pool is None else model.pool.members.max_model_len or None
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
