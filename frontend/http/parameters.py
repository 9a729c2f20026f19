"""Reads the parameters of a management call from its query and, if there is one, its JSON body."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from lmi_server.contract.errors import BadParameterError, PayloadTooLargeError
from lmi_server.contract.texts.quoting import excerpt

T = TypeVar("T")
F = TypeVar("F", bound=msgspec.Struct)

_NAME = re.compile(r"\w[\w.:@+=-]{0,254}")
_LARGEST_BODY = 1 << 20
_PAGE = 100  # entries on a page at most


async def parameters(request: Request) -> dict[str, str]:
    """Return the parameters of the query and of a JSON body; the query wins. Raises BadParameterError."""
    given: dict[str, str] = {}
    if request.headers.get("content-type", "").partition(";")[0].strip() == "application/json":
        given = _from_json(await _body(request))
    given |= request.query_params
    for name, value in given.items():
        if "\0" in name or "\0" in value:  # no path, name or URL has one, and functions for files raise ValueError
            raise BadParameterError(f"Parameter {excerpt(name)} holds a NUL character")
    return given


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > _LARGEST_BODY:
                raise PayloadTooLargeError(f"the body of this call is longer than {_LARGEST_BODY} bytes")
    except ClientDisconnect:
        raise BadParameterError("The client went away before its request was complete") from None
    return bytes(body)


async def json_fields(request: Request, fields: type[F]) -> F:
    """Return the JSON body of a call as a msgspec.Struct; an empty body stands for {}. Raises BadParameterError."""
    body = await _body(request)
    try:
        return msgspec.json.decode(body or b"{}", type=fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadParameterError(f"The body is not what {request.url.path} takes: {error}") from error


def _from_json(body: bytes) -> dict[str, str]:
    if not body:
        return {}
    try:
        decoded = msgspec.json.decode(body, type=dict[str, str | bool | int | float | None])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadParameterError(f"The body is not a JSON object of parameters: {error}") from error
    return {key: _text(value) for key, value in decoded.items() if value is not None}


def _text(value: str | bool | int | float) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_name(parameter: str, name: str) -> None:
    """Raise BadParameterError if `name` cannot be the name of a model, a version or an adapter.

    A path must reach it, and a line of the log must show it as it is.
    """
    if _NAME.fullmatch(name) is None:
        raise BadParameterError(
            f'Parameter {parameter} is "{excerpt(name)}"; it takes up to 255 letters, digits and _ . : @ + = -, '
            "the first is a letter, a digit or _; no path reaches a name with a slash"
        )


def integer(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name, "").strip()
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise BadParameterError(f'Parameter {name} is "{excerpt(text)}"; it takes an integer') from None


def truth(given: Mapping[str, str], name: str, default: bool) -> bool:
    text = given.get(name, "").strip().lower()
    if text and text not in ("true", "false"):
        raise BadParameterError(f'Parameter {name} is "{excerpt(text)}"; it takes true or false')
    return text == "true" if text else default


def page(query: Mapping[str, str], everything: Sequence[T]) -> tuple[Sequence[T], dict[str, str]]:
    """Return the entries of the page that the query asks for, and the token of the next page, if there is one."""
    limit = integer(query, "limit", _PAGE)
    start = max(0, integer(query, "next_page_token", 0))
    if not 0 <= limit <= _PAGE:
        limit = _PAGE
    end = start + limit
    return everything[start:end], {"nextPageToken": str(end)} if end < len(everything) else {}
