"""Parses the bodies of requests that generate no text by their Content-Type, and writes answers by their Accept.

The content types are LMI's. A body that is not JSON stands for {"inputs": ...}: lines of CSV, one text, or the bytes of
an image or a sound.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from lmi_server.contract.errors import RequestError
from lmi_server.contract.handler import Response
from lmi_server.contract.protocol import Input
from lmi_server.dialects import fields

JSON = "application/json"
CSV = "text/csv"
TEXT = "text/plain"
JSON_LINES = "application/jsonlines"
ND_LIST = "tensor/ndlist"
NPZ = "tensor/npz"


def parse_body(request: Input) -> Mapping[str, Any]:
    """Return the body as an object with `inputs` and `parameters`, or with the fields of a single input.

    Raises RequestError if the body is not what its Content-Type promises.
    """
    kind = fields.media_type(request)
    if kind == CSV:
        return {"inputs": fields.csv_inputs(request)}
    if kind == TEXT:
        return {"inputs": [fields.plain_text(request).removeprefix("\ufeff")]}
    if kind.startswith(("image/", "audio/")):
        if not request.body():
            raise RequestError(f"the body is empty; send the bytes of an {kind.partition('/')[0]} file")
        return {"inputs": request.body(), **_parameters_beside(request)}
    return fields.json_object(request)


def _parameters_beside(request: Input) -> dict[str, Any]:
    """Return the `parameters` of the query, an object in JSON, for a body that is a file. Raises RequestError."""
    sent = [value for name, value in request.content[:-1] if name == "parameters"]
    if not sent:
        return {}
    try:
        return {"parameters": msgspec.json.decode(sent[-1])}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RequestError("parameters in the query are not JSON; send an object, percent-encoded") from None


def accepted_type(request: Input, default: str, known: Collection[str] = ()) -> str:
    """Return the first media type of Accept that is in `known`, or `default` if the request accepts anything.

    An empty `known` allows all types of this module. Raises RequestError if none fits.
    """
    header = request.properties.get("accept", "")
    kinds = [kind.partition(";")[0].strip().lower() for kind in header.split(",")]
    for kind in kinds:
        if kind in ("", "*/*"):
            return default
        fitting = [one for one in (default, *(known or _WRITERS)) if _fits(one, kind)]
        if fitting:
            return fitting[0]
    raise RequestError(f"Accept: {fields.show(header)} is not supported; accept {', '.join(known or _WRITERS)}")


def _fits(kind: str, accepted: str) -> bool:
    """Return whether a media type is the accepted one; that may be a range, such as image/*."""
    return kind.startswith(accepted[:-1]) if accepted.endswith("/*") else kind == accepted


def encode_response(result: Any, kind: str) -> Response:
    """Return a response with `result` (plain values and numpy's) as the media type `kind` of `accepted_type`.

    Raises RequestError if `result` has no such form.
    """
    return Response(headers=[("content-type", kind)], data=_WRITERS[kind](result))


def encode_json(value: Any) -> bytes:
    """Return `value`, made of plain values and of numpy's, as JSON. Not-a-number becomes null."""
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays and numbers of numpy
        return value.tolist()
    raise RequestError(f"the answer contains a {type(value).__name__}, which JSON cannot express")


def _json_lines(value: Any) -> bytes:
    items = value if isinstance(value, list) else [value]
    return b"".join(encode_json(item) + b"\n" for item in items)


def _csv_lines(value: Any) -> bytes:
    """Return rows of numbers as they are, and objects under a line with the names of their fields."""
    rows = msgspec.json.decode(encode_json(value if isinstance(value, list) else [value]))
    out = io.StringIO(newline="")
    flat = [row[0] if isinstance(row, list) and len(row) == 1 and isinstance(row[0], dict) else row for row in rows]
    if all(isinstance(row, dict) for row in flat):
        names = list(dict.fromkeys(name for row in flat for name in row))
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([_cell(row.get(name)) for name in names] for row in flat)
    else:
        rows_of_cells: Sequence[Sequence[Any]] = [row if isinstance(row, list) else [row] for row in flat]
        csv.writer(out, lineterminator="\n").writerows([_cell(cell) for cell in row] for row in rows_of_cells)
    return out.getvalue().encode()


def _cell(value: Any) -> Any:
    if isinstance(value, dict | list):
        return encode_json(value).decode()
    return value


def _texts(value: Any) -> bytes:
    """Return a line per item: its text if it is one or an object with a single text, and JSON otherwise."""
    items = value if isinstance(value, list) else [value]
    return "".join(f"{_shown_text(item)}\n" for item in items).encode()


def _shown_text(item: Any) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, dict) and len(item) == 1:
        only = next(iter(item.values()))
        if isinstance(only, str):
            return only
    return encode_json(item).decode()


def _nd_list(value: Any) -> bytes:
    from djl_python.np_util import to_nd_list  # which only workers have

    return bytes(to_nd_list(_arrays(value)))


def _npz(value: Any) -> bytes:
    from djl_python.np_util import to_npz

    return to_npz(_arrays(value))


def _arrays(value: Any) -> list[Any]:
    """Return the array of each input. Raises RequestError if a result is no array of numbers."""
    import numpy as np

    try:
        arrays = [np.asarray(item) for item in value]
    except ValueError:  # lists of different lengths
        arrays = []
    if not arrays or any(array.dtype.kind not in "biuf" for array in arrays):
        raise RequestError(f"Accept: the answer is not a tensor; accept {JSON}")
    return arrays


_WRITERS = {
    JSON: encode_json,
    CSV: _csv_lines,
    JSON_LINES: _json_lines,
    TEXT: _texts,
    ND_LIST: _nd_list,
    NPZ: _npz,
}
