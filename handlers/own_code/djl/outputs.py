"""From djl_python's Output to the responses that the server sends, for one request or for each of a batch."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from djl_python.outputs import ERROR_MESSAGE, Output, stream_pieces
from msgspec.structs import replace

from lmi_server.contract.handler import Response
from lmi_server.contract.texts.quoting import sendable, sendable_message

logger = logging.getLogger(__name__)

_CODES = range(200, 600)
FAILED, OUT_OF_MEMORY, _UNANSWERED = 424, 507, 400
STEP_FAILED = "Batch inference failed"
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_IN_BATCH = re.compile(r"batch_(\d+)\.(.*)", re.DOTALL)
_PROPERTY_IN_BATCH = re.compile(r"batch_(\d+)[._](.*)", re.DOTALL)
# The server itself decides how an answer is sent. Handlers that copy a request's headers into
# their answer set these.
_SERVER_HEADERS = frozenset(
    {
        "connection", "content-length", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip
DEFAULT_MESSAGES = ("", "OK", "No content", None)
"""Messages of an Output that the user's code did not set."""
_LATIN_1_END = 256
_REASON = re.compile(r"[\t\x20-\x7e]{1,256}")  # HTTP/1.1 allows no line break; clients read nothing but ASCII alike


def respond(output: Any) -> Response:
    """Return the response that the handler's `output` means for one request."""
    if output is None:
        return Response(status=204)
    if not isinstance(output, Output):
        return error_response(f"Invalid output type: {type(output)}")
    if not isinstance(output.code, int) or output.code not in _CODES:
        return error_response(f"Output.code is {output.code!r}; set a status from {_CODES.start} to {_CODES.stop - 1}")
    reason = reason_of(output)
    response = Response(status=output.code, headers=headers_of(output.properties), after=_after(output), reason=reason)
    if output.stream_content is not None:
        response.stream = stream_pieces(output)
    elif output.content.keys:
        response.data = _body(output.content.keys, output.content.values)
    elif output.code >= 400 and not reason and output.message not in DEFAULT_MESSAGES:
        response.data = error_body(output.code, output.message, output.message)
        response.headers = [("content-type", "application/json")]
    return response


def split(output: Any, count: int) -> list[Response]:
    """Return the responses that the handler's `output` means for the `count` requests of a batch, in order."""
    if output is None and count > 1:
        return [_no_answer("the handler returned None; return an Output with content for each request")] * count
    whole = respond(output)
    if not isinstance(output, Output) or whole.status >= 300:
        outcomes = [replace(whole, after=None) for _ in range(count)]  # LMI gives an error of the whole batch to each
    elif whole.stream is not None:
        outcomes = [_no_answer("add_stream_content answers one request, not a batch; set batch_size=1")] * count
    else:
        outcomes = _parts(output, count, whole)
    outcomes[-1] = replace(outcomes[-1], after=whole.after)  # once for the batch, after its last answer
    return outcomes


def _parts(output: Output, count: int, whole: Response) -> list[Response]:
    contents: list[tuple[list[str | None], list[Any]]] = [([], []) for _ in range(count)]
    unassigned = []
    for key, value in zip(output.content.keys, output.content.values, strict=True):
        found = None if key is None else _IN_BATCH.fullmatch(key)
        if found is None or int(found[1]) >= count:
            unassigned.append(key)
            continue
        keys, values = contents[int(found[1])]
        keys.append(found[2])
        values.append(value)
    if unassigned:
        logger.error("the answer to a batch of %d has content that belongs to no request, under %s", count, unassigned)
    shared = {name: value for name, value in output.properties.items() if _PROPERTY_IN_BATCH.fullmatch(name) is None}
    own = in_batch(output.properties, count)
    return [_part(index, *contents[index], {**shared, **own[index]}, whole) for index in range(count)]


def _part(
    index: int, keys: list[str | None], values: list[Any], properties: dict[str, Any], whole: Response
) -> Response:
    if not keys:
        return _no_answer(f"the handler added no content batch_{index}.<key> for request {index} of the batch")
    code = str(properties.pop("code", whole.status))
    if not code.isdecimal() or int(code) not in _CODES:
        return error_response(f"batch_{index}_code is {code!r}; set a status from {_CODES.start} to {_CODES.stop - 1}")
    reason = whole.reason if int(code) == whole.status else ""
    return Response(status=int(code), headers=headers_of(properties), data=_body(keys, values), reason=reason)


def reason_of(output: Output) -> str:
    """Return the message of `output` if the code set one that HTTP/1.1 allows as reason phrase, otherwise ""."""
    return "" if output.message in DEFAULT_MESSAGES else _reason(str(output.message))


def _reason(text: str) -> str:
    return "" if _REASON.fullmatch(text) is None else text


def body_of(output: Output) -> bytes:
    """Return the content that becomes the body of the answer: the one under "data", or else the first."""
    return _body(output.content.keys, output.content.values) if output.content.keys else b""


def chunk_fields(output: Output) -> dict[str, str] | None:
    """Return the fields that `create_stream_chunk_output` wrote into `output`; None if it did not make `output`."""
    if not output.content.values:
        return None
    try:
        fields = Output.binary_decode(output.content.values[0])
    except (ValueError, TypeError):
        return None
    return fields if "data" in fields else None


def in_batch(properties: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return for each of `count` requests the properties `batch_<index>_<name>` that are its own, by <name>."""
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
    """Return the headers of an Output's properties, without names that HTTP does not allow.

    Their names are in lower case. Of properties that differ only in case, the last one counts.
    """
    sent = {}
    for name, value in properties.items():
        known = _header_name(name)
        if known is not None:
            sent[known] = _header_value(value)
    return list(sent.items())


@functools.lru_cache(1024)  # a model sets the same names all the time
def _header_name(name: Any) -> str | None:
    """Return the name of the header that a property means, None if it is not sent."""
    if not isinstance(name, str) or _HEADER_NAME.fullmatch(name) is None:
        logger.warning("property %r of an Output is not a valid name of an HTTP header; it is not sent", name)
        return None
    lower = name.lower()
    return None if lower in _SERVER_HEADERS else lower


def _header_value(value: Any) -> str:
    text = str(value).replace("\r", " ").replace("\n", " ")  # a line break would begin another header
    # The server writes headers as latin-1, as LMI's does. A text with other characters is sent as UTF-8.
    return text if ord(max(text, default="\0")) < _LATIN_1_END else sendable(text).encode().decode("latin-1")


def error_response(error: str, code: int = FAILED, message: str = ERROR_MESSAGE) -> Response:
    """Return LMI's answer to a request that made its handler fail."""
    error = sendable_message(error)
    data = error_body(code, message, error)
    return Response(status=code, headers=[("content-type", "application/json")], data=data, reason=message, error=error)


def piece_error(error: str, code: int, headers: list[tuple[str, str]]) -> Response:
    """Return LMI's answer to a request that its code ended with an error before the first byte.

    It happens in a rolling batch and asynchronously. `headers` are set by the code with the error.
    """
    error = sendable_message(error)
    body = json.dumps({"error": error, "code": code}).encode()
    return Response(status=code, headers=headers, data=body, reason=_reason(error), error=error)


def step_error(error: str, code: int) -> Response:
    """Return LMI's answer to a request in a failed step of a rolling batch; it has no headers."""
    error = sendable_message(error)
    return Response(status=code, data=error_body(code, STEP_FAILED, error), error=error)


def _no_answer(message: str) -> Response:
    """Return LMI's answer to a request of a batch for which the handler's Output has none."""
    body = {"code": _UNANSWERED, "type": "TranslateException", "message": message, "error": message}
    headers = [("content-type", "application/json")]
    return Response(status=_UNANSWERED, headers=headers, data=json.dumps(body, indent=2).encode())


def error_body(code: int, message: str, error: str) -> bytes:
    return json.dumps({"code": code, "message": message, "error": error}, indent=2).encode()
