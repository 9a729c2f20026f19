"""SageMaker's runtime API, and the asynchronous jobs of its header x-synchronous."""

from __future__ import annotations

import asyncio

from starlette.routing import Route

from frontend.features import Inference, ServerFeature, ServerParts
from frontend.sagemaker.async_invocations import AsyncInvocations
from frontend.sagemaker.async_jobs import AsyncJobs
from frontend.sagemaker.job_store import memory_for_answers
from frontend.sagemaker.request_signatures import SignatureCheck
from frontend.sagemaker.runtime import ENDPOINTS, PATHS, STREAM_PATH, STREAM_TYPE, SageMakerRuntime
from frontend.sagemaker.settings import SignatureSettings
from frontend.sagemaker.transform import TransformParameters
from lmi_server.configuration.server_settings import ServerSettings


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
