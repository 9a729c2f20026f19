"""The lines of a batch: one request in JSON each, and one answer.

The forms are those of OpenAI's Batch API, which `vllm run-batch` reads and writes, too.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from lmi_server.contract.texts.quoting import excerpt
from lmi_server.contract.texts.sendable import json_bytes
from lmi_server.dialects import routes

ROUTES = {
    "/v1/chat/completions": routes.CHAT_COMPLETIONS,
    "/v1/completions": routes.COMPLETIONS,
    "/v1/embeddings": routes.EMBEDDINGS,
    "/v1/responses": routes.RESPONSES,
    "/v1/score": routes.SCORE,
    "/score": routes.SCORE,
    "/v1/rerank": routes.RERANK,
    "/v2/rerank": routes.RERANK,
    "/rerank": routes.RERANK,
}
"""What a line may have as its url, with the route of each: OpenAI's endpoints, and vLLM's for scores."""

_LONGEST_ID = 512
_SHOWN_ID = 100


class LineError(Exception):
    """A line that is no request: what OpenAI's `code`, `message` and `param` say of it."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class BatchLine(NamedTuple):
    """One request. `number` counts from 1; `body` is a JSON object whose priority, if it has any, is null."""

    number: int
    custom_id: str
    url: str
    body: bytes


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Body(msgspec.Struct):
    """What a batch reads of a body, which may hold anything else: that makes no objects here."""

    stream: msgspec.Raw = msgspec.Raw(b"")
    priority: msgspec.Raw = msgspec.Raw(b"")


_decode = msgspec.json.Decoder(_Line).decode
_decode_body = msgspec.json.Decoder(_Body).decode


def split_lines(blocks: Iterable[bytes], longest: int) -> Iterator[bytes | None]:
    """Yield the lines of a file that comes in blocks, None for one of more than `longest` bytes.

    No more than a line and a block are in memory.
    """
    rest: list[bytes] = []
    size = 0
    is_first = True
    for block in blocks:
        *ended, last = block.split(b"\n")
        for piece in ended:
            size += len(piece)
            line = None if size > longest else b"".join((*rest, piece))
            if is_first and line is not None:
                line = line.removeprefix(codecs.BOM_UTF8)
            yield line
            rest, size, is_first = [], 0, False
        size += len(last)
        rest = [*rest, last] if size <= longest else []
    if size:
        yield None if size > longest else b"".join(rest).removeprefix(codecs.BOM_UTF8 if is_first else b"")


def parse_line(number: int, data: bytes | None, longest: int, endpoint: str | None = None) -> BatchLine | None:
    """Return the request of a line, None for an empty one. Raises LineError.

    `data` is None if the line has more than `longest` bytes. All lines of a batch with an `endpoint` have its url.
    """
    if data is None:
        raise LineError("line_too_long", f"the line is longer than max_request_size={longest} bytes")
    if not data.strip():
        return None
    try:
        data.decode()  # what is skipped in JSON may hold any bytes
        line = _decode(data)
        body = _decode_body(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineError("invalid_json_line", f"the line is no request: {excerpt(str(error), 200)}") from None
    _check(line, body, endpoint)
    text = bytes(line.body)
    if bytes(body.priority):
        text = text[:-1] + b',"priority":null}'  # of one name twice, the last counts
    return BatchLine(number, line.custom_id, line.url, text)


def _check(line: _Line, body: _Body, endpoint: str | None) -> None:
    if not 0 < len(line.custom_id) <= _LONGEST_ID:
        raise LineError("invalid_custom_id", f"custom_id takes 1 to {_LONGEST_ID} characters", "custom_id")
    if line.method != "POST":
        raise LineError("invalid_method", f"method is {excerpt(line.method, 20)}; send POST", "method")
    if line.url not in ROUTES:
        raise LineError("invalid_url", f"url is {excerpt(line.url)}; send one of {', '.join(ROUTES)}", "url")
    if endpoint is not None and line.url != endpoint:
        raise LineError("mismatched_url", f"url is {line.url}, and the batch is for {endpoint}", "url")
    if bytes(body.stream) == b"true":
        raise LineError("stream_not_supported", "stream is true; a batch has whole answers", "body.stream")


def duplicate_id(custom_id: str) -> LineError:
    """Return the error of a custom_id that an earlier line has."""
    shown = excerpt(custom_id, _SHOWN_ID)
    return LineError("duplicate_custom_id", f"custom_id {shown} is that of an earlier line", "custom_id")


def answer_line(line_id: str, custom_id: str, status: int, request_id: str, data: bytes) -> bytes:
    """Return the line of an answer, without its end."""
    response = {"status_code": status, "request_id": request_id, "body": _json_of(data)}
    return json_bytes({"id": line_id, "custom_id": custom_id, "response": response, "error": None})


def error_line(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Return the line of a request that has got no answer, without its end."""
    error = {"code": code, "message": message}
    return json_bytes({"id": line_id, "custom_id": custom_id, "response": None, "error": error})


def is_answered(status: int) -> bool:
    """Return whether an answer belongs into the output, and not among the errors."""
    return status < HTTPStatus.BAD_REQUEST


def _json_of(data: bytes) -> Any:
    """Return an answer as a value on one line; a text if it is not JSON."""
    try:
        data.decode()  # which the formatting does not check
        return msgspec.Raw(msgspec.json.format(data, indent=-1))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data.decode(errors="replace")
