"""What a batch transform job of SageMaker asks before its requests: how it should send them.

A job asks `GET /execution-parameters` once, and uses what its own call (CreateTransformJob) does not say. Then it sends
each record to `/invocations`, as an endpoint does.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontend.http.responses import json_response
from lmi_server.contract.errors import LmiServerError
from lmi_server.serving.models.registry import ModelRegistry

_MIB = 1 << 20
_MAX_PAYLOAD = 6  # MiB, SageMaker's own default
_MAX_TOGETHER = 100  # MiB: SageMaker refuses more for the payloads of all requests at a time


class TransformParameters:
    """Answers for the models of one server, whose bodies have at most `max_size` bytes."""

    def __init__(self, models: ModelRegistry, max_size: int) -> None:
        self._models = models
        self._payload = max(1, min(_MAX_PAYLOAD, max_size // _MIB))

    def routes(self) -> list[Route]:
        return [Route("/execution-parameters", self.parameters)]

    async def parameters(self, request: Request) -> Response:
        """SageMaker: say how a batch transform job should send its records."""
        return json_response(
            {
                "MaxConcurrentTransforms": max(1, min(self._places(), _MAX_TOGETHER // self._payload)),
                "BatchStrategy": "SINGLE_RECORD",
                "MaxPayloadInMB": self._payload,
            }
        )

    def _places(self) -> int:
        """Return how many requests the default model has room for at a time."""
        try:
            endpoint = self._models.only or self._models.default
            pool = None if endpoint is None else endpoint.choose(None).loaded()
        except LmiServerError:
            return 1
        return 1 if pool is None else pool.dispatcher.router.places
