"""One inference request as the relay reads it: its head, and its body as bytes."""

from __future__ import annotations

import codecs
import io
import re
import time
from collections.abc import Callable, Mapping

import msgspec

from frontend.access.api_keys import TENANT
from frontend.http.clients import Receive, Scope
from frontend.http.protocol import ClientConnection, connection_of, header_names
from frontend.http.responses import new_request_id
from frontend.observability.trace_context import RequestTrace
from frontend.relay.response import RelayedResponse
from lmi_server.contract.errors import BadParameterError, MalformedUrlError, PayloadTooLargeError, RequestError
from lmi_server.contract.protocol import DEFAULT_PRIORITY, Input
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.dialects.forms import is_form, split_pairs
from lmi_server.dialects.optional import model_in_body
from lmi_server.serving.models.model import Model
from lmi_server.supervisor.job import Deadline

MODEL_IN_BODY = model_in_body()
_INFERENCE_ID = "x-amzn-sagemaker-inference-id"
_CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
# Bounded in length, because int() takes quadratic time in the number of digits.
_INTEGER = re.compile(r"-?[0-9]{1,10}")
_MALFORMED = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_PRIORITIES = range(-(2**31), 2**31)
_MAX_PRIORITY_SIZE = len(str(_PRIORITIES.start))  # bytes of JSON
_SHORT_BODY = 64 * 1024
_REQUEST_TIMEOUT = "x-request-timeout"
# What the clients of OpenAI and Anthropic send unasked: the seconds for which they wait for a part of the answer.
_CLIENT_TIMEOUTS = ("x-stainless-read-timeout", "x-stainless-timeout")
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


class _Fields(msgspec.Struct):
    """Values as JSON: whatever a client sends in them, it makes no objects here."""

    model: msgspec.Raw = msgspec.Raw(b"null")
    priority: msgspec.Raw = msgspec.Raw(b"null")


_decode = msgspec.json.Decoder(_Fields).decode
_decode_value = msgspec.json.Decoder().decode


class ClientGoneError(Exception):
    """The client went away before its request was complete."""


class RelayedRequest:
    """One request, and what the relay finds for it: the model, the body, the trace, and where the answer is written.

    `properties` are the headers (names in lower case, the last of several wins) with SageMaker's custom attributes.
    `names` are their names as the client wrote them, one per line; `attributes` is the header of the attributes as it
    came. `body` is None until it is read.
    """

    response: RelayedResponse

    def __init__(self, route: str, scope: Scope, receive: Receive, id_header: str) -> None:
        self.arrived = time.monotonic()
        self.route = route
        self.scope = scope
        self.connection: ClientConnection = connection_of(scope)
        self.properties = properties = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self._content_length = properties.get("content-length")  # uvicorn has checked that it is a number
        self._fields: tuple[str | None, int | None] | None = None  # of the body
        self._receive = receive
        self.names = b"\n".join(header_names(scope)).decode("latin-1")
        self.attributes = ""
        if _CUSTOM_ATTRIBUTES in properties:
            self._add_attributes(properties[_CUSTOM_ATTRIBUTES])
        self.request_id = properties.get(id_header) or properties.get(_INFERENCE_ID) or new_request_id()
        self.query: list[tuple[str, bytes]] = []
        self.model: Model | None = None
        self.body: bytes | None = None
        self.trace: RequestTrace | None = None

    def _add_attributes(self, attributes: str) -> None:
        """Add SageMaker's custom attributes to the properties.

        They never replace a header, which could change how the body is read. A header without any name=value, such as
        an id, stays as it is.
        """
        if "=" not in attributes:
            return
        self.attributes = self.properties.pop(_CUSTOM_ATTRIBUTES)
        for attribute in attributes.split(";"):
            name, separator, value = attribute.partition("=")
            if separator:
                self.names += f"\n{name.strip()}"
                self.properties.setdefault(name.strip().lower(), value.strip())

    @property
    def has_form(self) -> bool:
        return is_form(self.properties.get("content-type", ""))

    def read_query(self) -> None:
        """Read the query parameters. Raises MalformedUrlError if path or query is not percent-encoded."""
        query: bytes = self.scope["query_string"]
        path: bytes = self.scope["raw_path"]
        for part in (path, query) if b"%" in query or b"%" in path else ():
            if _MALFORMED.search(part):
                raise MalformedUrlError(
                    f"a percent sign in {excerpt(part.decode('latin-1'))} encodes no byte; send it as %25"
                )
        if query:
            pairs = split_pairs(query.decode("latin-1"))
            # "=x" is a name, as in LMI
            self.query = [(name, value.encode()) if name else (value, b"") for name, value in pairs]

    def parameter(self, name: str) -> str | None:
        """Return a parameter of the query, or a header of that name."""
        in_query = last_of(self.query, name) if self.query else None
        return in_query or self.properties.get(name)

    def fields_in(self, body: bytes) -> tuple[str | None, int | None]:
        """Return the result of `model_and_priority` for the body, which is decoded once."""
        if self._fields is None:
            self._fields = model_and_priority(body)
        return self._fields

    def priority(self, body: bytes) -> int:
        """Return the priority in the body, or else in the header. Raises RequestError."""
        header = self.properties.get("x-priority")
        default = DEFAULT_PRIORITY if header is None else parse_priority(header)
        if self.route not in MODEL_IN_BODY or (self._fields is None and b'"priority"' not in body):
            return default
        try:
            _, in_body = self.fields_in(body)
        except RequestError:  # the user's own code may be able to read the body
            return default
        return default if in_body is None else in_body

    def submission(self) -> tuple[Input, Callable[[], None], Deadline | None, bytes]:
        """Return the arguments with which a pool accepts the request. Raises RequestError for wrong headers."""
        body, properties, query = self.body or b"", self.properties, self.query
        content = [*query, ("data", body)] if query else [("data", body)]
        priority = self.priority(body)
        received = Input(self.route, properties, content, self.request_id, priority, self.names, self.attributes)
        return received, self.connection.abort, deadline_of(properties, self.arrived), self.scope.get(TENANT, b"")

    async def read_body(self, max_size: int) -> bytes:
        """Return the body. Raises PayloadTooLargeError if it is longer than `max_size`, and ClientGoneError."""
        if self._content_length is not None and int(self._content_length) > max_size:
            raise _too_large(max_size)
        message = await self._receive()
        body: bytes = message.get("body", b"")
        if message.get("more_body"):
            body = await self._read_rest(body, max_size)
        elif message["type"] == "http.disconnect":
            raise ClientGoneError
        if len(body) > max_size:
            raise _too_large(max_size)
        return body

    async def _read_rest(self, start: bytes, max_size: int) -> bytes:
        parts = io.BytesIO()  # which gives its bytes away without a copy
        size = parts.write(start)
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            size += parts.write(message["body"])
            if size > max_size:
                raise _too_large(max_size)
            if not message["more_body"]:
                return parts.getvalue()

    async def skip_body(self) -> bool:
        """Return whether the connection can serve another request although the body of this one was not read.

        It cannot if the client waits for "100 Continue" and may send its body or not: the parser would take what
        follows for a request. A short body is asked for then; a long one is not worth its way.
        """
        if "expect" not in self.properties:
            return True
        if int(self._content_length or _SHORT_BODY + 1) > _SHORT_BODY:
            return False
        while True:
            message = await self._receive()
            if not message.get("more_body"):
                return bool(message["type"] == "http.request")


def sent_request_id(scope: Scope, id_header: str) -> str | None:
    """Return the id that the client gives the request, here or to SageMaker."""
    headers = dict(scope["headers"])
    sent = headers.get(id_header.encode("latin-1")) or headers.get(_INFERENCE_ID.encode())
    return str(sent, "latin-1") if sent else None


def last_of(entries: list[tuple[str, bytes]], key: str) -> str | None:
    """Return the last of the values of `key` in a query or a form."""
    values = [value.decode("utf-8", "replace") for name, value in entries if name == key]
    return values[-1] if values else None


def model_and_priority(body: bytes) -> tuple[str | None, int | None]:
    """Return the `model` and the `priority` of an OpenAI request, each None if there is none or its value is wrong.

    So it is for a body that is not valid JSON: the worker refuses these with a better message. Raises RequestError if
    the body is nested too deeply to be read.
    """
    try:
        fields = _decode(body.removeprefix(codecs.BOM_UTF8))
        named, asked = memoryview(fields.model), memoryview(fields.priority)
        model = _decode_value(named) if named[:1].tobytes() == b'"' else None
        priority = _decode_value(asked) if len(asked) <= _MAX_PRIORITY_SIZE else None
    except RecursionError:
        raise RequestError("the body is nested too deeply; send a flat JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None, None
    is_allowed = type(priority) is int and priority in _PRIORITIES  # `isinstance` would take true for 1
    return model, priority if is_allowed else None


def parse_priority(value: str) -> int:
    """Return the value of an `x-priority` header: lower is served sooner.

    Raises RequestError if it is not an integer of 32 bits.
    """
    if _INTEGER.fullmatch(value) is None or int(value) not in _PRIORITIES:
        raise RequestError(
            f"Header x-priority is '{excerpt(value)}'; it takes an integer (lower is served sooner) "
            f"from {_PRIORITIES.start} to {_PRIORITIES.stop - 1}"
        )
    return int(value)


def _too_large(max_size: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the body is longer than max_request_size={max_size} bytes; send less, or raise it")


def deadline_of(headers: Mapping[str, str], arrived: float) -> Deadline | None:
    """Return the deadline of a request that arrived at `arrived`; None if it has none. Raises BadParameterError."""
    asked = headers.get(_REQUEST_TIMEOUT)
    if asked is not None:
        seconds = _seconds(asked)
        if not seconds:
            raise BadParameterError(
                f"Header {_REQUEST_TIMEOUT} is '{excerpt(asked)}'; send a number of seconds above 0, such as 30 or 2.5"
            )
        return Deadline(arrived + seconds, f"{_REQUEST_TIMEOUT}={seconds:g}", ends_running=True)
    for name in _CLIENT_TIMEOUTS:
        if name in headers and (seconds := _seconds(headers[name])):
            return Deadline(arrived + seconds, f"{name}={seconds:g}", ends_running=False)
    return None


def _seconds(text: str) -> float:
    """Return a number of seconds, 0.0 if the text is none."""
    return float(text) if _SECONDS.fullmatch(text) is not None else 0.0
