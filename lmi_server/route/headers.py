"""Which headers a router passes on: headers of one connection end here (RFC 9110, section 7.6.1)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from lmi_server.contract.protocol import CUSTOM_ATTRIBUTES, Input

_OF_CONNECTION = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-authentication-info",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "http2-settings",
    }
)
# Written here, or about the connection of the client: the body is decoded, and where a client is only a router knows.
_OF_REQUEST = frozenset({"host", "content-length", "content-encoding", "accept-encoding", "expect", "via", "forwarded"})
_OF_ANSWER = frozenset({"content-length", "server", "date", "x-request-id"})
_FORWARDED = "x-forwarded-"
_ALSO_FORWARDED = frozenset({"x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip"})
_KEYS = frozenset({"authorization", "x-api-key"})
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


def request_lines(request: Input, key: str | None) -> bytes:
    """Return the lines of the headers that go on with a request; with a `key` for the server, in place of any other.

    A line names this router, by which a server knows that its client is not on its own machine.
    """
    properties = request.properties
    own = _custom_attribute_names(request)
    dropped = {*_names_in(properties.get("connection", "")), *(() if key is None else _KEYS)}
    lines = [
        f"{name}: {value}\r\n"
        for name, value in properties.items()
        if name not in own and name not in dropped and _goes_on(name) and _is_safe(name, value)
    ]
    if request.custom_attributes and _is_safe(CUSTOM_ATTRIBUTES.lower(), request.custom_attributes):
        lines.append(f"{CUSTOM_ATTRIBUTES.lower()}: {request.custom_attributes}\r\n")
    if key is not None:
        lines.append(f"authorization: Bearer {key}\r\n")
    if _is_safe("x-request-id", request.request_id) and "x-request-id" not in properties:
        lines.append(f"x-request-id: {request.request_id}\r\n")
    lines.append("via: 1.1 lmi-server\r\nforwarded: for=unknown\r\n")
    return "".join(lines).encode("latin-1", "replace")


def answer_headers(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Return the headers of an answer that go on to the client, with names in lower case."""
    pairs = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers]
    dropped = {*_names_in(",".join(value for name, value in pairs if name == "connection"))}
    return [
        (name, value)
        for name, value in pairs
        if name not in dropped and name not in _OF_CONNECTION and name not in _OF_ANSWER and _is_safe(name, value)
    ]


def _goes_on(name: str) -> bool:
    is_forwarded = name.startswith(_FORWARDED) or name in _ALSO_FORWARDED
    return not is_forwarded and name not in _OF_CONNECTION and name not in _OF_REQUEST


def _is_safe(name: str, value: str) -> bool:
    """Return whether these may be a line: neither can end it, whatever brought them here."""
    return _TOKEN.fullmatch(name) is not None and _VALUE.fullmatch(value) is not None


def _names_in(connection: str) -> Iterator[str]:
    """Yield the names in a Connection header."""
    for name in connection.split(","):
        yield name.strip().lower()


def _custom_attribute_names(request: Input) -> set[str]:
    """Return the properties that are custom attributes and no headers."""
    if not request.custom_attributes:
        return set()
    attributes: Iterable[str] = request.custom_attributes.split(";")
    names = {attribute.partition("=")[0].strip().lower() for attribute in attributes if "=" in attribute}
    given = Counter(name.lower() for name in request.names.splitlines())
    return {name for name in names if given[name] <= 1}
