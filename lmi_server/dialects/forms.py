"""Reads the fields of a form: `application/x-www-form-urlencoded` and `multipart/*` bodies.

It reads what DJL Serving's HTTP library does: text before the first part and after the last one, lines that end with a
bare LF, and any subtype of multipart.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from urllib.parse import parse_qsl, unquote_plus

from lmi_server.contract.errors import BadParameterError
from lmi_server.contract.texts.quoting import excerpt

MAX_FIELDS = 1000  # of a form, or parameters of a query
_LONGEST_HEAD = 16 * 1024  # bytes of the headers of a part
_LONGEST_SHORT = 6 * 1024  # bytes of a field that holds a name or a URL, percent-encoded
_URL_ENCODED = "application/x-www-form-urlencoded"
_MULTIPART = "multipart/"
_FORM_DATA = "multipart/form-data"
# curl declares whatever `-d` sends a form. In a real form these characters are percent-encoded.
_JSON_STARTS = (b"{", b"[")

_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]*)"|([^;\s]*))', re.IGNORECASE)
_NAME = re.compile(
    r'^content-disposition:.*?;\s*name=(?:"([^"\\]*(?:\\.[^"\\]*)*)"|([^;\s]*))', re.IGNORECASE | re.MULTILINE
)
_BLANK_LINE = re.compile(rb"\r?\n\r?\n")

Fields = list[tuple[str, bytes]]


def is_form(content_type: str) -> bool:
    """Return whether a body of this Content-Type may be a form."""
    kind = content_type.lstrip().lower()
    return kind.startswith((_URL_ENCODED, _MULTIPART))


def form_fields(content_type: str, body: bytes, only: Collection[str] | None = None) -> Fields | None:
    """Return the names and values of a form, in their order; None if the body is to be taken as it is.

    Taken as it is are a body of another type, JSON that is declared a form, and a multipart body without boundary or
    without names. With `only`, fields of other names may be left out, and values may be cut: for short texts in forms
    of any length.
    Raises BadParameterError if the body is not the form that it is declared to be, or has too many fields.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind == _URL_ENCODED:
        return None if body.lstrip().startswith(_JSON_STARTS) else _url_encoded(body, only)
    if not kind.startswith(_MULTIPART):
        return None
    boundary = _BOUNDARY.search(content_type)
    if boundary is None or not (text := boundary[1] or boundary[2]):
        return None
    return _multipart(excerpt(kind), text.encode("latin-1"), body, only)


def split_pairs(text: str) -> list[tuple[str, str]]:
    """Return the names and values of a query, or of a form that is written like one. Raises BadParameterError."""
    try:
        return parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise too_many_fields() from None


def _url_encoded(body: bytes, only: Collection[str] | None) -> Fields:
    if only is not None:
        body = _with_names(body, only)
    return [(name, value.encode()) for name, value in split_pairs(body.decode("utf-8", "replace"))]


def _with_names(body: bytes, only: Collection[str]) -> bytes:
    """Return the fields of these names, cut: decoding a text of escapes takes a hundred times as long as finding it."""
    if body.count(b"&") >= MAX_FIELDS:
        raise too_many_fields()
    found = []
    for field in body.split(b"&"):
        name, _, _ = field[:_LONGEST_SHORT].partition(b"=")
        if unquote_plus(name.decode("utf-8", "replace")) in only:
            found.append(field[:_LONGEST_SHORT])
    return b"&".join(found)


def too_many_fields() -> BadParameterError:
    """Return the error about a form or a query with more than `MAX_FIELDS`."""
    return BadParameterError(f"there are more than {MAX_FIELDS} fields in the form or parameters in the query")


def _multipart(kind: str, boundary: bytes, body: bytes, only: Collection[str] | None) -> Fields | None:
    longest = len(body) if only is None else _LONGEST_SHORT
    fields: Fields = []
    for count, part in enumerate(_parts(kind, boundary, body)):
        name, start, end = _field(kind, body, *part)
        if count == MAX_FIELDS:
            raise too_many_fields()
        if name is None and kind == _FORM_DATA:
            raise BadParameterError(f"the body is no {kind}: a part has no name; name it in its Content-Disposition")
        if name is None:
            return None
        if only is None or name in only:
            fields.append((name, body[start : min(end, start + longest)]))
    return fields


def _parts(kind: str, boundary: bytes, body: bytes) -> Iterator[tuple[int, int]]:
    """Yield where the parts are, from the end of one delimiter to the start of the next one."""
    delimiter = b"--" + boundary
    start = None
    lines = 0  # that begin like a delimiter
    at = 0 if body.startswith(delimiter) else _next_line(body, delimiter, 0)
    while at >= 0:
        end = at + len(delimiter)
        rest = _rest_of_line(body, end)
        if start is not None and rest in (b"", b"--"):
            yield start, at
        if rest == b"--":
            return
        if not rest:
            start = end
        lines += 1
        if lines > 2 * MAX_FIELDS:
            raise too_many_fields()
        at = _next_line(body, delimiter, end)
    shown = excerpt(boundary.decode("latin-1"))
    raise BadParameterError(f"the body is no {kind}: there is no --{shown}-- at its end")


def _next_line(body: bytes, beginning: bytes, start: int) -> int:
    """Return where the next line with this beginning starts, -1 if there is none."""
    found = body.find(b"\n" + beginning, max(0, start - 1))
    return found + 1 if found >= 0 else -1


def _rest_of_line(body: bytes, start: int) -> bytes:
    end = body.find(b"\n", start)
    return body[start : end if end >= 0 else len(body)].strip(b" \t\r")


def _field(kind: str, body: bytes, start: int, end: int) -> tuple[str | None, int, int]:
    """Return the name of a part, None if it has none, and where its value begins and ends."""
    blank = _BLANK_LINE.search(body, start, min(end, start + _LONGEST_HEAD))
    if blank is None:
        raise BadParameterError(
            f"the body is no {kind}: no empty line ends the headers of a part within {_LONGEST_HEAD} bytes"
        )
    name = _NAME.search(body[start : blank.start()].decode("utf-8", "replace"))
    begin = blank.end()
    last = body[max(begin, end - 2) : end]
    end -= len(last) - len(last.removesuffix(b"\n").removesuffix(b"\r"))
    return None if name is None else _unescape(name[1] or name[2] or ""), begin, end


def _unescape(name: str) -> str:
    """Return a quoted name without its escapes; a pattern that finds each takes a hundred times as long."""
    return "\\".join(piece.replace("\\", "") for piece in name.split("\\\\"))
