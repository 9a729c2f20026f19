"""SageMaker's runtime API, and the asynchronous jobs of its header x-synchronous."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontend.features import ServerFeature, ServerParts
from frontend.http.clients import Inference
from frontend.http.responses import json_response
from frontend.sagemaker.async_invocations import AsyncInvocations
from frontend.sagemaker.async_jobs import AsyncJobs
from frontend.sagemaker.job_store import memory_for_answers
from frontend.sagemaker.request_signatures import SignatureCheck
from frontend.sagemaker.runtime import ENDPOINTS, PATHS, STREAM_PATH, STREAM_TYPE, SageMakerRuntime
from frontend.sagemaker.settings import SignatureSettings
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.errors import LmiServerError
from lmi_server.serving.models.registry import ModelRegistry

_MIB = 1 << 20
_MAX_PAYLOAD = 6  # MiB, SageMaker's own default
_MAX_TOGETHER = 100  # MiB: SageMaker refuses more for the payloads of all requests at a time


def attach(server: ServerParts) -> ServerFeature:
    """Return the feature, which every server has."""
    return _Feature(server)


class _Feature(ServerFeature):
    paths = PATHS

    def __init__(self, server: ServerParts) -> None:
        self._server = server
        self._transform = TransformParameters(server.models, server.settings.max_request_size)
        self.answer_types = {STREAM_PATH: STREAM_TYPE}
        self._jobs: AsyncJobs
        self._invocations: AsyncInvocations

    def wrap(self, infer: Inference) -> Inference:
        """Return what takes requests with the headers of jobs. Raises ConfigurationError."""
        server, settings = self._server, self._server.settings
        answers = memory_for_answers(settings)
        self._jobs = AsyncJobs(infer, server.answer, server.check, settings, answers)
        self._invocations = AsyncInvocations(infer, server.check, settings, answers)
        signatures = _signatures(settings)
        runtime = SageMakerRuntime(server.models, self._jobs, self._invocations, server.answer, signatures)
        self.takers = {ENDPOINTS: runtime}
        return self._jobs

    def health_routes(self) -> list[Route]:
        return self._transform.routes()

    def drain(self) -> None:
        self._invocations.drain()

    async def finish(self) -> None:
        await asyncio.gather(self._jobs.finish(), self._invocations.finish())

    def give_up(self) -> None:
        self._jobs.give_up()
        self._invocations.give_up()


def _signatures(settings: ServerSettings) -> SignatureCheck | None:
    signing = settings.part(SignatureSettings)
    if signing.sigv4_keys is None:
        return None
    return SignatureCheck(signing.sigv4_keys, signing.sigv4_region, settings.max_request_size)


class TransformParameters:
    """What a batch transform job of SageMaker asks once, before its requests; bodies have at most `max_size` bytes.

    It uses what its own call (CreateTransformJob) does not say, and sends each record to `/invocations`.
    """

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
