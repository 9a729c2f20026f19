"""The hot path: one inference request from ASGI to a worker pool and its answer back to the client.

The front end relays bytes. It reads the path, the query and the headers. It reads the body in two cases only: for the
name of the model, if its route has one there, and for a priority.
"""

from __future__ import annotations

import codecs
import io
import logging
import re
import time
from collections.abc import Callable, Mapping
from random import random

import msgspec

from frontend.access.api_keys import TENANT
from frontend.access.management_access import Access
from frontend.http.clients import Receive, Scope, Send
from frontend.http.compression import decoded_body
from frontend.http.deadlines import deadline_of
from frontend.http.held_bytes import HeldBytes
from frontend.http.protocol import connection_of, header_names, keep_held
from frontend.http.request_ids import new_request_id
from frontend.http.responses import error_statuses, standard_headers
from frontend.management.implicit_registration import REGISTERED_IN_FORMS, ImplicitRegistration
from frontend.observability.error_rates import ErrorRates
from frontend.observability.metrics.collector import Metrics
from frontend.observability.metrics.lmi import CLIENT_GONE
from frontend.observability.request_reports import AnsweredRequest, RequestReports
from frontend.observability.trace_context import RequestTrace
from frontend.relay.model_names import refuse_unknown
from frontend.relay.response import Response
from lmi_server.configuration.server_settings import ServerSettings
from lmi_server.contract.errors import (
    BadParameterError,
    LmiServerError,
    MalformedUrlError,
    ModelNotFoundError,
    ModelNotReadyError,
    PayloadTooLargeError,
    RequestError,
    RouteNotFoundError,
)
from lmi_server.contract.protocol import CANCELLED, DEFAULT_PRIORITY, End, Error, Head, Input, Reply
from lmi_server.contract.quoting import excerpt
from lmi_server.dialects.adapters import naming_adapter
from lmi_server.dialects.errors import error_event, error_reply
from lmi_server.dialects.forms import form_fields, is_form, split_pairs
from lmi_server.dialects.routes import ANTHROPIC_ROUTES, MODEL_IN_BODY, PREDICTIONS, TGI, means_any_model
from lmi_server.serving.models import Model
from lmi_server.serving.pool import WorkerPool
from lmi_server.serving.registry import ModelRegistry
from lmi_server.supervisor.job import Deadline, Job

logger = logging.getLogger(__name__)

_SITE = "sec-fetch-site"
_INFERENCE_ID = "x-amzn-sagemaker-inference-id"
_CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"

# Bounded in length, because int() takes quadratic time in the number of digits.
_INTEGER = re.compile(r"-?[0-9]{1,10}")
_MODEL_IN_FORMS = ("model_name", "model")
_SHORT_BODY = 64 * 1024
_MALFORMED = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_PRIORITIES = range(-(2**31), 2**31)


class _NamedModel(msgspec.Struct):
    model: str | None = None


class _NamedPriority(msgspec.Struct):
    priority: int | None = None


_decode_model = msgspec.json.Decoder(_NamedModel).decode
_decode_priority = msgspec.json.Decoder(_NamedPriority).decode


class ClientGoneError(Exception):
    """The client went away before its request was complete."""


class Relay:
    """Answers inference requests. Set `draining` once the server shuts down.

    `headers` are added to every answer; `error_rates` counts errors; `reports` gets every request that has ended.
    """

    def __init__(self, models: ModelRegistry, metrics: Metrics, settings: ServerSettings, access: Access) -> None:
        self.draining = False
        self._pages = access.pages
        self.headers = standard_headers(settings)
        self.error_rates = ErrorRates(settings.error_rates)
        self._models = models
        self._metrics = metrics
        self.reports = RequestReports(settings, metrics, self.error_rates)
        self._max_request_size = settings.max_request_size
        self._request_id_header = settings.request_id_header.lower()
        self._statuses = error_statuses(settings)
        pattern = settings.model_url_pattern
        self._implicit = None if pattern is None else ImplicitRegistration(models, access.limits, pattern)

    async def __call__(
        self, route: str, name: str | None, version: str | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve one request. `route` is that of Input; `name` and `version` come from the path, None if it has none."""
        held = keep_held(scope)
        try:
            await self._serve(route, name, version, scope, receive, send, held)
        finally:
            held.release()

    async def _serve(
        self,
        route: str,
        name: str | None,
        version: str | None,
        scope: Scope,
        receive: Receive,
        send: Send,
        held: HeldBytes,
    ) -> None:
        arrived = time.monotonic()
        properties, names, attributes = _properties(scope)
        request_id = properties.get(self._request_id_header) or properties.get(_INFERENCE_ID) or new_request_id()
        traceparent = properties.get("traceparent")
        trace, tracing = None, self.reports.tracing
        if tracing is not None and (traceparent is not None or random() < tracing.ratio):
            trace = tracing.begin(properties, scope)
        connection = connection_of(scope)
        response = self._response(route, request_id, scope, send, trace)
        model: Model | None = None
        body: bytes | None = None
        try:
            if self._pages is not None:
                self._pages.check(properties.get("host", ""), properties.get("origin"), properties.get(_SITE))
            query = _query(scope)
            asked = version or _last(query, "model_version") or properties.get("model_version")
            try:
                if name is not None and version is None and route == PREDICTIONS:
                    model = self._models.endpoint(name).choose_preferring(asked)
                else:
                    model = self._choose(route, name, asked, properties, query)
                body = await self._body(scope, receive)
                if "content-encoding" in properties and (model is None or not model.runs_user_code):
                    body = await decoded_body(body, properties, self._max_request_size, held)
                if model is None or _has_named(route, model):
                    model = self._named_in(route, body, asked, properties, model)
            except ModelNotFoundError as error:
                if self._implicit is None or model is not None:
                    raise
                body = await self._body(scope, receive) if body is None else body
                fields = form_fields(properties.get("content-type", ""), body, REGISTERED_IN_FORMS) or []
                model = await self._implicit.register(name, version, properties, [*query, *fields])
                if model is None:
                    raise error from None
            content = [*query, ("data", body)]
            priority = parse_priority(properties.get("x-priority"))
            if route in MODEL_IN_BODY and b'"priority"' in body:
                priority = priority_named_in(body, priority)
            deadline = deadline_of(properties, arrived)
            pool = model.loaded()
            received = Input(route, properties, content, request_id, priority, names, attributes)
            tenant = scope.get(TENANT, b"")
            if pool.on_demand is None:
                job = pool.submit(received, connection.abort, deadline, tenant)
            else:
                pool, received, job = await _submit_holding(model, received, connection.abort, deadline, tenant)
        except LmiServerError as error:
            closes = self.draining or isinstance(error, PayloadTooLargeError)
            closes = closes or (body is None and not await self._skips_body(scope, receive))
            code = await self._refuse(model, route, error, closes, response)
            self.reports.refused(code, arrived, request_id, model, route, scope, trace, error.kind)
            return
        except ClientGoneError:
            code = connection.refused_with or CLIENT_GONE
            self._metrics.of(model).refused(code)
            self.reports.refused(code, arrived, request_id, model, route, scope, trace)
            return
        connection.watch(lambda: pool.cancel(job), job.reply)
        try:
            status = await _relay(route, job, response, self._statuses)
        finally:
            pool.cancel(job)
            connection.unwatch()
            if pool.on_demand is not None:
                pool.on_demand.release(received)
        client, ended = scope["client"], time.monotonic()
        self.reports.answered(AnsweredRequest(status, arrived, ended, model, job, body, client, trace, traceparent))

    async def refuse(self, route: str, error: LmiServerError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an inference request that is refused before it is read."""
        arrived = time.monotonic()
        request_id = self.request_id(scope)
        response = self._response(route, request_id, scope, send)
        closes = self.draining or not await self._skips_body(scope, receive)
        code = await self._refuse(None, route, error, closes, response)
        self.reports.refused(code, arrived, request_id, None, route, scope, kind=error.kind)

    def _response(
        self, route: str, request_id: str, scope: Scope, send: Send, trace: RequestTrace | None = None
    ) -> Response:
        headers = self.headers
        if trace is not None:
            headers = [(b"traceparent", trace.header.encode()), *headers]
        if route in ANTHROPIC_ROUTES:
            headers = [(b"request-id", request_id.encode("latin-1")), *headers]  # by which Anthropic's clients log it
        return Response(connection_of(scope), send, request_id, headers, scope)

    def request_id(self, scope: Scope) -> str:
        """Return the id that the client gives the request, here or to SageMaker, or a new one."""
        sent = _header(scope, self._request_id_header.encode("latin-1"))
        sent = sent or _header(scope, _INFERENCE_ID.encode("latin-1"))
        return new_request_id() if sent is None else sent.decode("latin-1")

    def _choose(
        self,
        route: str,
        name: str | None,
        version: str | None,
        properties: dict[str, str],
        query: list[tuple[str, bytes]],
    ) -> Model | None:
        """Return the model that path, query or headers name, or the default one; None if only the body can name it."""
        name = name or _last(query, "model_name") or properties.get("model_name")
        if name:
            return self._models.named(name, version)
        if self._models.only is not None:
            return self._models.only.choose(version)
        if self._models.default is not None and route not in MODEL_IN_BODY and not _has_form(properties):
            return self._models.default.choose(version)
        return None

    def _named_in(
        self, route: str, body: bytes, version: str | None, properties: dict[str, str], chosen: Model | None
    ) -> Model:
        """Return the model that the body names, or the default one; `chosen` if something else has named a model.

        An OpenAI request names it in `model`, also if it is a form; another form names it in `model_name`. Raises
        ModelNotFoundError if `model` is a name of another model.
        """
        fields = form_fields(properties["content-type"], body, _MODEL_IN_FORMS) if _has_form(properties) else None
        in_body = route in MODEL_IN_BODY
        name = model_named_in(body) if fields is None else _last(fields, "model") if in_body else None
        model = chosen or self._by_body(route, name, None if fields is None else _last(fields, "model_name"), version)
        if name is not None and in_body:
            refuse_unknown(self._models, model, name)
        return model

    def _by_body(self, route: str, name: str | None, in_form: str | None, version: str | None) -> Model:
        """Return the model of a body with `name` in `model` and `in_form` in a form's `model_name`, or the default."""
        if in_form:
            return self._models.named(in_form, version)
        if name is not None and not self._means_default(name):
            return self._models.named_as_model(name, version)
        if self._models.default is not None:
            return self._models.default.choose(version)
        self._models.refuse_if_untold()
        if route == TGI:
            raise RouteNotFoundError("Requested resource is not found: /; with several models, send model_name with it")
        raise BadParameterError("Parameter model_name is required.")

    def _means_default(self, name: str) -> bool:
        """Return whether `name` is one that clients send to a server with one model, and no model has it."""
        return means_any_model(name) and self._models.default is not None and not self._models.has(name)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        length = _header(scope, b"content-length")
        if length is not None and int(length) > self._max_request_size:  # uvicorn has checked that it is a number
            raise self._too_large()
        message = await receive()
        body: bytes = message.get("body", b"")
        if message.get("more_body"):
            body = await self._rest_of_body(body, receive)
        elif message["type"] == "http.disconnect":
            raise ClientGoneError
        if len(body) > self._max_request_size:
            raise self._too_large()
        return body

    async def _skips_body(self, scope: Scope, receive: Receive) -> bool:
        """Return whether the connection can serve another request although the body of this one was not read.

        It cannot if the client waits for "100 Continue" and may send its body or not: the parser would take what
        follows for a request. A short body is asked for then; a long one is not worth its way.
        """
        if _header(scope, b"expect") is None:
            return True
        if int(_header(scope, b"content-length") or _SHORT_BODY + 1) > _SHORT_BODY:
            return False
        while True:
            message = await receive()
            if not message.get("more_body"):
                return bool(message["type"] == "http.request")

    async def _rest_of_body(self, start: bytes, receive: Receive) -> bytes:
        parts = io.BytesIO()  # which gives its bytes away without a copy
        size = parts.write(start)
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            size += parts.write(message["body"])
            if size > self._max_request_size:
                raise self._too_large()
            if not message["more_body"]:
                return parts.getvalue()

    def _too_large(self) -> LmiServerError:
        return PayloadTooLargeError(
            f"the body is longer than max_request_size={self._max_request_size} bytes; send less, or raise it"
        )

    async def _refuse(
        self,
        model: Model | None,
        route: str,
        error: LmiServerError,
        closes: bool,
        response: Response,
    ) -> int:
        """Send the error; return its status."""
        status, headers, data = error_reply(route, response.shown(error), self._statuses, response.request_id)
        if closes:
            headers.append(("connection", "close"))
            response.linger()
        counts = self._metrics.of(model)
        counts.refused(status)
        counts.turned_away(error)
        self._metrics.failed(error)
        self.error_rates.count(status, error)
        await response.whole(status, headers, data)
        return status


async def _submit_holding(
    model: Model, request: Input, on_overflow: Callable[[], None], deadline: Deadline | None, tenant: bytes
) -> tuple[WorkerPool, Input, Job]:
    """Have `model` accept a request once its adapter is loaded; return the pool, the request as it went there, the job.

    While that is awaited the model may get another pool, which is tried then.
    """
    while True:
        pool = model.loaded()
        assert model.resolved is not None, "a loaded model has a configuration"
        named = naming_adapter(request, model.resolved.served_names)
        try:
            if pool.on_demand is None:
                return pool, named, pool.submit(named, on_overflow, deadline, tenant)
            return pool, named, await pool.submit_holding(pool.on_demand, named, on_overflow, deadline, tenant)
        except ModelNotReadyError:
            if pool is model.pool:
                raise


async def _relay(route: str, job: Job, response: Response, statuses: Mapping[type[LmiServerError], int]) -> int:
    """Send the answer of `job` as it arrives; return its status."""
    reply = job.reply
    await reply.wait()
    head = reply.head
    if head is None:
        return await _send_whole(route, reply.terminal, response, statuses)
    await response.begin(head)
    while True:
        terminal = reply.terminal
        data = reply.take()
        if terminal is not None and not reply.unread:
            if isinstance(terminal, End) and terminal.message:
                data = response.shown_answer(data, terminal.message)
            await response.end(data + _ending(route, head, terminal, response))
            return _status_of_end(route, terminal, statuses)
        if data:
            await response.chunk(data)
        if reply.is_held:
            job.release()
        await reply.wait()


async def _send_whole(
    route: str, terminal: Reply | End | Error | None, response: Response, statuses: Mapping[type[LmiServerError], int]
) -> int:
    if isinstance(terminal, Reply):
        data, reason = terminal.data, terminal.reason
        if terminal.message:
            data, reason = response.shown_answer(data, terminal.message), response.shown_text(reason)
        await response.whole(terminal.status, terminal.headers, data, reason)
        return terminal.status
    assert isinstance(terminal, Error), "a stream has a head before its end"
    if terminal.kind == CANCELLED:
        return CLIENT_GONE
    error = terminal.exception()
    status, headers, data = error_reply(route, response.shown(error), statuses, response.request_id)
    await response.whole(status, headers, data)
    return status


def _status_of_end(route: str, terminal: Reply | End | Error, statuses: Mapping[type[LmiServerError], int]) -> int:
    """Return the status under which the metrics count a stream: that of the error that ended it, if one did."""
    if not isinstance(terminal, Error):
        return terminal.status
    if terminal.kind == CANCELLED:
        return CLIENT_GONE
    return error_reply(route, terminal.exception(), statuses)[0]


def _ending(route: str, head: Head, terminal: Reply | End | Error, response: Response) -> bytes:
    """Return the bytes after the last chunk of a stream: an error event if an error ended it, otherwise nothing."""
    if not isinstance(terminal, Error):
        return b""
    content_type = next((value for name, value in head.headers if name == "content-type"), "")
    error = terminal.exception()
    return error_event(route, content_type, response.shown(error), response.request_id)


def model_named_in(body: bytes) -> str | None:
    """Return the name of the model in the body of an OpenAI request, None if there is none.

    A body that is not valid JSON has none: the worker refuses it with a better message. Raises RequestError if the body
    is nested too deeply to be read.
    """
    try:
        return _decode_model(body.removeprefix(codecs.BOM_UTF8)).model
    except RecursionError:
        raise RequestError("the body is nested too deeply; send a flat JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _has_named(route: str, model: Model) -> bool:
    """Return whether the body of a request to `model` names a model that the front end has to check."""
    return route in MODEL_IN_BODY and not model.runs_user_code


def priority_named_in(body: bytes, default: int) -> int:
    """Return the `priority` in the body of an OpenAI request, `default` if there is none.

    So it is for a body that cannot be read, or a priority that is not allowed: the worker refuses these.
    """
    try:
        named = _decode_priority(body.removeprefix(codecs.BOM_UTF8)).priority
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return default
    return named if named is not None and named in _PRIORITIES else default


def _has_form(properties: dict[str, str]) -> bool:
    return is_form(properties.get("content-type", ""))


def _properties(scope: Scope) -> tuple[dict[str, str], str, str]:
    """Return the headers (names in lower case, the last of several wins) with SageMaker's custom attributes.

    Return also their names as the client wrote them, one per line, and the attributes as they came. An attribute never
    replaces a header: it must not change how the body is read. A header without any name=value, such as an id, stays
    as it is.
    """
    properties = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    names = b"\n".join(header_names(scope)).decode("latin-1")
    attributes, exploded = properties.get(_CUSTOM_ATTRIBUTES), ""
    if attributes is not None and "=" in attributes:
        exploded = properties.pop(_CUSTOM_ATTRIBUTES)
        for attribute in attributes.split(";"):
            name, separator, value = attribute.partition("=")
            if separator:
                names += f"\n{name.strip()}"
                properties.setdefault(name.strip().lower(), value.strip())
    return properties, names, exploded


def parse_priority(value: str | None) -> int:
    """Return the value of an `x-priority` header: lower is served sooner, 3 if there is none.

    Raises RequestError if it is not an integer of 32 bits.
    """
    if value is None:
        return DEFAULT_PRIORITY
    if _INTEGER.fullmatch(value) is None or int(value) not in _PRIORITIES:
        raise RequestError(
            f"Header x-priority is '{excerpt(value)}'; it takes an integer (lower is served sooner) "
            f"from {_PRIORITIES.start} to {_PRIORITIES.stop - 1}"
        )
    return int(value)


def _header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def _query(scope: Scope) -> list[tuple[str, bytes]]:
    """Return the query parameters. Raises MalformedUrlError if path or query is not percent-encoded."""
    query: bytes = scope["query_string"]
    if b"%" in query or b"%" in scope["raw_path"]:
        _check_percent_signs(scope["raw_path"], query)
    if not query:
        return []
    pairs = split_pairs(query.decode("latin-1"))
    return [(name, value.encode()) if name else (value, b"") for name, value in pairs]  # "=x" is a name, as in LMI


def _check_percent_signs(*parts: bytes) -> None:
    for part in parts:
        if _MALFORMED.search(part):
            raise MalformedUrlError(
                f"a percent sign in {excerpt(part.decode('latin-1'))} encodes no byte; send it as %25"
            )


def _last(entries: list[tuple[str, bytes]], key: str) -> str | None:
    values = [value.decode("utf-8", "replace") for name, value in entries if name == key]
    return values[-1] if values else None
