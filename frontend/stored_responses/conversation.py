"""A request for a response: what it asks of the store, and its input with the conversation before it.

Inputs stay texts in JSON: whatever a client sends, it makes no objects here.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

import msgspec

from frontend.storage.owners import is_id
from frontend.stored_responses.records import EMPTY, PREFIX, ResponseStore, StoredResponse
from lmi_server.contract.errors import ObjectNotFoundError, PayloadTooLargeError, RequestError
from lmi_server.contract.texts.quoting import excerpt

_LONGEST_CHAIN = 1000  # responses
_WHITESPACE = b" \t\r\n"


class _Asked(msgspec.Struct):
    input: msgspec.Raw = msgspec.Raw(b"null")
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    model: str | None = None


class ResponseRequest:
    """One request. `body` is a JSON object; raises RequestError if it cannot be read.

    `is_kept`, `in_background`, `streams` and `previous` are what it asks for; `model` is the name that it has. `input`
    is the list of its own items, in JSON.
    """

    def __init__(self, body: bytes) -> None:
        self._body = body.removeprefix(codecs.BOM_UTF8).strip(_WHITESPACE)
        try:
            self._body.decode()  # what is skipped in JSON may hold any bytes
            asked = msgspec.json.decode(self._body, type=_Asked)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(f"the body is no request for a response: {excerpt(str(error), 300)}") from None
        self.input = _as_list(asked.input)
        self.is_kept = asked.store is not False
        self.in_background = asked.background is True
        self.previous = asked.previous_response_id
        self.model = asked.model
        if self.in_background and not self.is_kept:
            raise RequestError("background is true and store is false; a response in the background is stored")
        if self.in_background and asked.stream:
            raise RequestError("background and stream are true; leave out stream, and poll /v1/responses/{id}")

    def body_after(self, history: bytes) -> bytes:
        """Return the body for the model: its input begins with `history`, a list, and the store's fields are null.

        They follow the fields that the client has sent: of one name twice, the last counts.
        """
        more: dict[str, Any] = {}
        if self.in_background:
            more["background"] = None
        if self.previous is not None:
            more["previous_response_id"] = None
        if history != EMPTY and self.input != EMPTY:
            more["input"] = msgspec.Raw(_join((history, self.input)))
        return self._body[:-1] + b"," + msgspec.json.encode(more)[1:] if more else self._body


def history_of(store: ResponseStore, owner: str, last: str, longest: int) -> bytes:
    """Return the list of the items of the conversation that ends with the response `last`, at most `longest` bytes.

    Raises ObjectNotFoundError if a part of it is not kept, RequestError if it cannot be continued; and OSError.
    """
    turns: list[bytes] = []
    size = 0
    following: str | None = last
    while following is not None:
        record = _turn(store, owner, following)
        turns.append(_join((bytes(record.input), msgspec.json.encode(record.output))))
        size += len(turns[-1])
        if size > longest or len(turns) > _LONGEST_CHAIN:
            raise PayloadTooLargeError(
                f"the conversation before is longer than max_request_size={longest} bytes or {_LONGEST_CHAIN} "
                "responses; begin a new one"
            )
        following = record.previous
    return _join(reversed(turns))


def _turn(store: ResponseStore, owner: str, response_id: str) -> StoredResponse:
    record = store.load(owner, response_id) if is_id(PREFIX, response_id) else None
    if record is None:
        raise ObjectNotFoundError(f"Previous response with id '{excerpt(response_id)}' not found.")
    status = record.response.get("status")
    if status not in ("completed", "incomplete"):
        raise RequestError(f"previous response {record.id} is {status}; it cannot be continued")
    return record


def _as_list(given: msgspec.Raw) -> bytes:
    """Return an input as a list of items; an empty one if it is neither a text nor a list, which the model refuses."""
    text = bytes(given).strip(_WHITESPACE)
    if text.startswith(b'"'):
        return msgspec.json.encode([{"type": "message", "role": "user", "content": given}])
    return text if text.startswith(b"[") else EMPTY


def _join(lists: Iterable[bytes]) -> bytes:
    """Return one list of the items of several, all in JSON."""
    inner = (text[1:-1].strip(_WHITESPACE) for text in lists)
    return b"[" + b",".join(items for items in inner if items) + b"]"
