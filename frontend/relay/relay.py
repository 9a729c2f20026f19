"""The hot path: one inference request from ASGI to a worker pool and its answer back to the client.

The front end relays bytes. It reads the path, the query and the headers. It reads the body in two cases only: for the
name of the model, if its route has one there, and for a priority.
"""

from __future__ import annotations

from collections.abc import Callable
from random import random

from frontend.access.management_access import Access
from frontend.http.clients import Receive, Scope, Send, Target
from frontend.http.compression import decoded_body
from frontend.http.held_bytes import HeldBytes
from frontend.http.protocol import keep_held
from frontend.http.responses import error_statuses, new_request_id, standard_headers
from frontend.management.implicit_registration import REGISTERED_IN_FORMS, ImplicitRegistration
from frontend.observability.error_rates import ErrorRates
from frontend.observability.metrics.collector import Metrics
from frontend.observability.request_record import CLIENT_GONE
from frontend.observability.request_reports import RequestReports
from frontend.observability.trace_context import Tracer
from frontend.relay.answer import relay_stream, reply_with_error, send_whole
from frontend.relay.model_choice import ModelChoice
from frontend.relay.request import MODEL_IN_BODY, ClientGoneError, RelayedRequest, sent_request_id
from frontend.relay.response import RelayedResponse
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.errors import LmiServerError, ModelNotFoundError, ModelNotReadyError, PayloadTooLargeError
from lmi_server.contract.protocol import Input
from lmi_server.dialects.adapters import naming_adapter
from lmi_server.dialects.forms import form_fields
from lmi_server.dialects.optional import optional_dialects
from lmi_server.serving.models.model import Model
from lmi_server.serving.models.registry import ModelRegistry
from lmi_server.serving.pool.worker_pool import WorkerPool
from lmi_server.supervisor.job import Deadline, Job


class Relay:
    """Answers inference requests. Set `draining` once the server shuts down.

    `headers` are added to every answer; `error_rates` counts errors; `reports` gets every request that has ended.
    """

    def __init__(self, models: ModelRegistry, metrics: Metrics, settings: ServerSettings, access: Access) -> None:
        self.draining = False
        self._pages = access.pages
        self.headers = standard_headers(settings)
        self.error_rates = ErrorRates(settings.error_rates)
        self._choice = ModelChoice(models)
        self._metrics = metrics
        self.reports = RequestReports(settings, metrics, self.error_rates)
        self._max_request_size = settings.max_request_size
        self._request_id_header = settings.request_id_header.lower()
        self._id_headers = optional_dialects().id_headers
        self._statuses = error_statuses(settings)
        pattern = settings.model_url_pattern
        self._implicit = None if pattern is None else ImplicitRegistration(models, access.limits, pattern)

    async def __call__(self, target: Target, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        route, name, version = target
        held = keep_held(scope)
        try:
            request = RelayedRequest(route, scope, receive, self._request_id_header)
            self._prepare_response(request, send, self.reports.tracing)
            try:
                self._check_page(request)
                request.read_query()
                model = await self._find_model(request, name, version, held)
                submission = request.submission()
                pool = model.serving(submission[0])
                if pool.on_demand is None and pool.gate is None:
                    job = pool.submit(*submission)
                else:
                    pool, job = await _submit_holding(model, *submission)
            except LmiServerError as error:
                await self._refuse(request, error)
            except ClientGoneError:
                self._count_gone(request)
            else:
                await self._answer(request, model, pool, job)
        finally:
            held.release()

    async def refuse(self, route: str, error: LmiServerError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an inference request that is refused before it is read."""
        request = RelayedRequest(route, scope, receive, self._request_id_header)
        self._prepare_response(request, send)
        await self._refuse(request, error)

    def request_id(self, scope: Scope) -> str:
        """Return the id that the client gives the request, here or to SageMaker, or a new one."""
        return sent_request_id(scope, self._request_id_header) or new_request_id()

    # --- the steps ---

    def _prepare_response(self, request: RelayedRequest, send: Send, tracing: Tracer | None = None) -> None:
        headers = self.headers
        if tracing is not None and ("traceparent" in request.properties or random() < tracing.ratio):
            request.trace = trace = tracing.begin(request.properties, request.scope)
            headers = headers if trace is None else [(b"traceparent", trace.header.encode()), *headers]
        if request.route in self._id_headers:
            headers = [(self._id_headers[request.route], request.request_id.encode("latin-1")), *headers]
        request.response = RelayedResponse(request.connection, send, request.request_id, headers)

    def _check_page(self, request: RelayedRequest) -> None:
        """Raise PermissionDeniedError for a web page of another site."""
        if self._pages is not None:
            headers = request.properties
            self._pages.check(headers.get("host", ""), headers.get("origin"), headers.get("sec-fetch-site"))

    async def _find_model(
        self, request: RelayedRequest, name: str | None, version: str | None, held: HeldBytes
    ) -> Model:
        """Return the model that serves the request, whose body is read then. It may be registered for the request."""
        try:
            request.model = model = self._choice.by_head(request, name, version)
            request.body = body = await request.read_body(self._max_request_size)
            if model is None or not model.runs_user_code:  # the user's own code gets the bytes as they were sent
                if "content-encoding" in request.properties:
                    request.body = body = await decoded_body(body, request.properties, self._max_request_size, held)
                if model is None or request.route in MODEL_IN_BODY:
                    request.model = model = self._choice.by_body(request, body, version)
        except ModelNotFoundError:
            if self._implicit is None or request.model is not None:
                raise
            model = await self._register(self._implicit, request, name, version)
            if model is None:
                raise
            request.model = model
        return model

    async def _register(
        self, implicit: ImplicitRegistration, request: RelayedRequest, name: str | None, version: str | None
    ) -> Model | None:
        """Return the model that the request describes, once it is loaded; None if it describes none."""
        if request.body is None:
            request.body = await request.read_body(self._max_request_size)
        fields = form_fields(request.properties.get("content-type", ""), request.body, REGISTERED_IN_FORMS) or []
        return await implicit.register(name, version, request.properties, [*request.query, *fields])

    async def _answer(self, request: RelayedRequest, model: Model, pool: WorkerPool, job: Job) -> None:
        connection, reply = request.connection, job.reply
        connection.watch(lambda: pool.dispatcher.cancel(job), reply)
        try:
            await reply.wait()
            if reply.head is None:
                status = await send_whole(request, reply.terminal, self._statuses)
            else:
                status = await relay_stream(request, job, reply.head, self._statuses)
        finally:
            pool.dispatcher.cancel(job)
            connection.unwatch()
            if pool.on_demand is not None:
                pool.on_demand.release(job.request)
        arrived, body, trace = request.arrived, request.body or b"", request.trace
        if model.trial is not None:
            model.trial.note(pool, job, status)
        traceparent = request.properties.get("traceparent")
        self.reports.report_answer(status, arrived, model, job, body, request.scope, trace, traceparent)

    # --- requests that no worker gets ---

    async def _refuse(self, request: RelayedRequest, error: LmiServerError) -> None:
        closes = self.draining or isinstance(error, PayloadTooLargeError)
        closes = closes or (request.body is None and not await request.skip_body())
        status, headers, data = reply_with_error(request, error, self._statuses)
        if closes:
            headers.append(("connection", "close"))
            request.connection.linger()
        counts = self._metrics.for_model(request.model)
        counts.count_refusal(status)
        counts.count_overload(error)
        self._metrics.count_error(error)
        self.error_rates.count(status, error)
        await request.response.whole(status, headers, data)
        self._report_refused(request, status, error.kind)

    def _count_gone(self, request: RelayedRequest) -> None:
        status = request.connection.refused_with or CLIENT_GONE
        self._metrics.for_model(request.model).count_refusal(status)
        self._report_refused(request, status)

    def _report_refused(self, request: RelayedRequest, status: int, kind: str = "") -> None:
        model, route, trace = request.model, request.route, request.trace
        self.reports.report_refusal(
            status, request.arrived, request.request_id, model, route, request.scope, trace, kind
        )


async def _submit_holding(
    model: Model, received: Input, on_overflow: Callable[[], None], deadline: Deadline | None, tenant: bytes
) -> tuple[WorkerPool, Job]:
    """Have `model` accept a request once its gate and its adapter are there; meanwhile it may get another pool."""
    while True:
        pool = model.serving(received)
        if pool.gate is not None:
            await pool.gate.wait(deadline)
            if pool is not model.serving(received):
                continue
        if pool.on_demand is None:
            return pool, pool.submit(received, on_overflow, deadline, tenant)
        assert model.resolved is not None, "a loaded model has a configuration"
        named = naming_adapter(received, model.resolved.served_names)
        try:
            return pool, await pool.submit_holding(pool.on_demand, named, on_overflow, deadline, tenant)
        except ModelNotReadyError:
            if pool is model.serving(received):
                raise
