"""Reads the fields of a form: `application/x-www-form-urlencoded` and `multipart/*` bodies.

It reads what DJL Serving's HTTP library does: text before the first part and after the last one, lines that end with a
bare LF, and any subtype of multipart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import parse_qsl

from lmi_server.contract.errors import BadParameterError

_URL_ENCODED = "application/x-www-form-urlencoded"
_MULTIPART = "multipart/"
_FORM_DATA = "multipart/form-data"
# curl declares whatever `-d` sends a form. In a real form these characters are percent-encoded.
_JSON_STARTS = (b"{", b"[")

_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]*)"|([^;\s]*))', re.IGNORECASE)
_NAME = re.compile(r'^content-disposition:.*?;\s*name=(?:"((?:[^"\\]|\\.)*)"|([^;\s]*))', re.IGNORECASE | re.MULTILINE)
_ESCAPED = re.compile(r"\\(.)")
_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_LF = ord("\n")

Fields = list[tuple[str, bytes]]


def is_form(content_type: str) -> bool:
    """Return whether a body of this Content-Type may be a form."""
    kind = content_type.lstrip().lower()
    return kind.startswith((_URL_ENCODED, _MULTIPART))


def form_fields(content_type: str, body: bytes) -> Fields | None:
    """Return the names and values of a form, in their order; None if the body is to be taken as it is.

    Taken as it is are a body of another type, JSON that is declared a form, and a multipart body without boundary or
    without names.
    Raises BadParameterError if the body is not the form that it is declared to be.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind == _URL_ENCODED:
        return None if body.lstrip().startswith(_JSON_STARTS) else _url_encoded(body)
    if not kind.startswith(_MULTIPART):
        return None
    boundary = _BOUNDARY.search(content_type)
    if boundary is None or not (text := boundary[1] or boundary[2]):
        return None
    return _multipart(kind, text.encode("latin-1"), body)


def _url_encoded(body: bytes) -> Fields:
    pairs = parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True)
    return [(name, value.encode()) for name, value in pairs]


def _multipart(kind: str, boundary: bytes, body: bytes) -> Fields | None:
    fields = []
    for part in _parts(kind, boundary, body):
        name, value = _field(kind, part)
        if name is not None:
            fields.append((name, value))
        elif kind == _FORM_DATA:
            raise BadParameterError(f"the body is no {kind}: a part has no name; name it in its Content-Disposition")
        else:
            return None
    return fields


def _parts(kind: str, boundary: bytes, body: bytes) -> Iterator[bytes]:
    """Yield what is between the delimiters, from the end of one delimiter to the start of the next one."""
    delimiter = b"--" + boundary
    start = None
    at = body.find(delimiter)
    while at >= 0:
        end = at + len(delimiter)
        if at == 0 or body[at - 1] == _LF:
            rest = _rest_of_line(body, end)
            if start is not None and rest in (b"", b"--"):
                yield body[start:at]
            if rest == b"--":
                return
            if not rest:
                start = end
        at = body.find(delimiter, end)
    raise BadParameterError(f"the body is no {kind}: there is no --{boundary.decode('latin-1')}-- at its end")


def _rest_of_line(body: bytes, start: int) -> bytes:
    end = body.find(b"\n", start)
    return body[start : end if end >= 0 else len(body)].strip(b" \t\r")


def _field(kind: str, part: bytes) -> tuple[str | None, bytes]:
    """Return the name of a part, None if it has none, and its value."""
    blank = _BLANK_LINE.search(part)
    if blank is None:
        raise BadParameterError(f"the body is no {kind}: no empty line ends the headers of a part")
    name = _NAME.search(part[: blank.start()].decode("utf-8", "replace"))
    value = part[blank.end() :].removesuffix(b"\n").removesuffix(b"\r")
    return None if name is None else _ESCAPED.sub(r"\1", name[1] or name[2] or ""), value
