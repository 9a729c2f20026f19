"""From the server's requests to djl_python's Input, one or a batch of them, and from its Output to responses."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from djl_python.inputs import Input, make_input
from djl_python.outputs import ERROR_MESSAGE, Output
from msgspec.structs import replace
from python_multipart import multipart
from python_multipart.exceptions import FormParserError

from lmi_server.contract.errors import BadParameterError, RequestError
from lmi_server.contract.handler import Response
from lmi_server.contract.protocol import Input as Request

logger = logging.getLogger(__name__)

_URL_ENCODED = "application/x-www-form-urlencoded"
# curl says "form" of whatever -d sends; a form has these characters encoded.
_JSON_STARTS = (b"{", b"[")
_CODES = range(200, 600)
_FAILED = 424
_ADAPTER = "adapter"  # of a query or a form
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_IN_BATCH = re.compile(r"batch_(\d+)\.(.*)", re.DOTALL)
_PROPERTY_IN_BATCH = re.compile(r"batch_(\d+)[._](.*)", re.DOTALL)
# They say how the answer is sent, which is the server's affair; handlers that copy the request's headers send them.
_CONNECTION_HEADERS = frozenset(
    {"connection", "content-length", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
)


class Requests:
    """Makes Inputs. `common` are the properties of each; clients may not set `handler` unless `may_choose_handler`.

    `adapters` are those that requests may name, None where any name means something to the code alone.
    """

    def __init__(
        self,
        function_name: str,
        common: Mapping[str, Any],
        may_choose_handler: bool,
        adapters: Container[str] | None = None,
    ) -> None:
        self._function_name = function_name
        self._adapters = adapters
        self.common = {**common, "handler": function_name}
        self._may_choose_handler = may_choose_handler

    def one(self, request: Request) -> Input:
        """Return one request. Raises RequestError."""
        content = self.content(request)
        own = request.properties
        properties = {**self.common, **own, "requestId": own.get("x-request-id", "")}
        if not self._may_choose_handler:
            properties["handler"] = self._function_name
        return make_input(properties, content, properties["handler"])

    def batch(self, requests: Sequence[Request]) -> Input:
        """Return several requests as one. Raises RequestError."""
        properties = dict(self.common)
        content = []
        for index, request in enumerate(requests):
            prefix = f"batch_{index:03d}."
            properties |= {prefix + name: value for name, value in request.properties.items()}
            properties[prefix + "requestId"] = request.properties.get("x-request-id", "")
            content += [(prefix + key, value) for key, value in self.content(request)]
        properties["batch_size"] = str(len(requests))
        return make_input(properties, content, self._function_name)

    def content(self, request: Request) -> list[tuple[str, bytes]]:
        """Return the content of one request. Raises RequestError where it asks for what it may not."""
        if "handler" in request.properties and not self._may_choose_handler:
            raise BadParameterError("The handler can't be overridden in a request")
        content = content_of(request)
        if self._adapters is not None:
            self._check_adapter(content, self._adapters)
        return content

    def _check_adapter(self, content: Sequence[tuple[str, bytes]], adapters: Container[str]) -> None:
        for key, value in content:
            name = value.decode(errors="replace") if key == _ADAPTER else ""
            if name and name not in adapters:
                raise RequestError(f"The adapter {name} has not been registered")


def content_of(request: Request) -> list[tuple[str, bytes]]:
    """Return query parameters and body; the fields of a form are entries of their own. Raises RequestError."""
    content_type = request.properties.get("content-type", "")
    form = content_type.partition(";")[0].strip().lower()
    if form != _URL_ENCODED and not form.startswith("multipart/"):
        return request.content
    *query, (_, body) = request.content
    if form == _URL_ENCODED and body.lstrip().startswith(_JSON_STARTS):
        return request.content
    content = [*query, *(_url_encoded(body) if form == _URL_ENCODED else _multipart(content_type, body))]
    return content or [("data", body)]  # no content at all means that the model is to be loaded


def _url_encoded(body: bytes) -> list[tuple[str, bytes]]:
    return [(name, value.encode()) for name, value in parse_qsl(body.decode("latin-1"), keep_blank_values=True)]


def _multipart(content_type: str, body: bytes) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []

    def on_field(field: Any) -> None:
        found.append(((field.field_name or b"").decode("utf-8", "replace"), field.value or b""))

    def on_file(file: Any) -> None:
        file.file_object.seek(0)
        found.append(((file.field_name or b"").decode("utf-8", "replace"), file.file_object.read()))
        file.close()

    headers = {"Content-Type": content_type.encode("latin-1"), "Content-Length": str(len(body)).encode()}
    try:
        multipart.parse_form(headers, io.BytesIO(body), on_field, on_file)
    except FormParserError as error:
        raise RequestError(f"the body is no {content_type.partition(';')[0]}: {error}") from error
    if body and not found:
        raise RequestError(f"the body is no {content_type.partition(';')[0]}: there is no whole field in it")
    return found


# --- answers ---


def respond(output: Any) -> Response:
    """Return what the handler's `output` means for one request."""
    if output is None:
        return Response(status=204)
    if not isinstance(output, Output):
        return failed(f"Invalid output type: {type(output)}")
    if output.code not in _CODES:
        return failed(f"Output.code is {output.code!r}; it takes a status from {_CODES.start} to {_CODES.stop - 1}")
    response = Response(status=output.code, headers=headers_of(output.properties), after=_after(output))
    if output.stream_content is not None:
        response.stream = output.stream()
    elif output.content.keys:
        response.data = _body(output.content.keys, output.content.values)
    elif output.code >= 400:
        response.data = error_body(output.code, output.message, output.message)
        response.headers = [("content-type", "application/json")]
    return response


def split(output: Any, count: int) -> list[Response]:
    """Return what the handler's `output` means for each request of a batch of `count`."""
    whole = respond(output)
    if not isinstance(output, Output) or whole.status >= 300:
        outcomes = [replace(whole, after=None) for _ in range(count)]  # shared, as LMI does
    elif whole.stream is not None:
        outcomes = [failed("add_stream_content answers one request, not a batch; set batch_size=1")] * count
    else:
        outcomes = _parts(output, count)
    outcomes[-1] = replace(outcomes[-1], after=whole.after)
    return outcomes


def _parts(output: Output, count: int) -> list[Response]:
    contents: list[tuple[list[str | None], list[Any]]] = [([], []) for _ in range(count)]
    strangers = []
    for key, value in zip(output.content.keys, output.content.values, strict=True):
        found = None if key is None else _IN_BATCH.fullmatch(key)
        if found is None or int(found[1]) >= count:
            strangers.append(key)
            continue
        keys, values = contents[int(found[1])]
        keys.append(found[2])
        values.append(value)
    if strangers:
        logger.error("the answer to a batch of %d has content for none of them, under %s", count, strangers)
    shared = {name: value for name, value in output.properties.items() if _PROPERTY_IN_BATCH.fullmatch(name) is None}
    own = in_batch(output.properties, count)
    return [_part(index, *contents[index], {**shared, **own[index]}) for index in range(count)]


def _part(index: int, keys: list[str | None], values: list[Any], properties: dict[str, Any]) -> Response:
    if not keys:
        return failed(f"the handler answered a batch without content batch_{index}.<key> for this request of it")
    code = str(properties.pop("code", 200))
    if not code.isdecimal() or int(code) not in _CODES:
        return failed(f"batch_{index}_code is {code!r}; it takes a status from {_CODES.start} to {_CODES.stop - 1}")
    return Response(status=int(code), headers=headers_of(properties), data=_body(keys, values))


def body_of(output: Output) -> bytes:
    """Return the content that is the body of the answer."""
    return _body(output.content.keys, output.content.values) if output.content.keys else b""


def in_batch(properties: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the properties that each of `count` requests has for itself alone, `batch_<index>_<name>`."""
    own = [dict[str, Any]() for _ in range(count)]
    for name, value in properties.items():
        found = _PROPERTY_IN_BATCH.fullmatch(name)
        if found is not None and int(found[1]) < count:
            own[int(found[1])][found[2]] = value
    return own


def _body(keys: list[str | None], values: list[Any]) -> bytes:
    return bytes(values[keys.index("data") if "data" in keys else 0])


def _after(output: Output) -> Callable[[], None] | None:
    return None if output.finalize_function is None else output.execute_finalize


def headers_of(properties: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the headers that an Output's properties mean, fit to be sent."""
    return [(name, _header_value(value)) for name, value in properties.items() if _is_header(name)]


def _is_header(name: str) -> bool:
    if _HEADER_NAME.fullmatch(name) is None:
        logger.warning("property %r of an Output is no name of a header; it is left out", name)
        return False
    return name.lower() not in _CONNECTION_HEADERS


def _header_value(value: Any) -> str:
    text = str(value).replace("\r", " ").replace("\n", " ")
    return text.encode("utf-8").decode("latin-1")


def failed(error: str, code: int = _FAILED, message: str = ERROR_MESSAGE) -> Response:
    """Return LMI's answer to a request whose handler failed."""
    return Response(status=code, headers=[("content-type", "application/json")], data=error_body(code, message, error))


def piece_error(error: str, code: int) -> Response:
    """Return LMI's answer to a request that failed in a rolling batch, or asynchronously, before its first byte."""
    body = json.dumps({"error": error, "code": code}).encode()
    return Response(status=code, headers=[("content-type", "application/json")], data=body)


def error_body(code: int, message: str, error: str) -> bytes:
    return json.dumps({"code": code, "message": message, "error": error}, indent=2).encode()
