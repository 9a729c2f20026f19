"""Decodes the body of a request by its content type, and encodes an answer by what the request accepts."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from djl_python.inputs import Input
from djl_python.optional_packages import needs
from djl_python.outputs import Output

_HEADERS = ("question", "context", "inputs")
"""The first line of a CSV file has at least one of these names."""


def decode_csv(inputs: Input, require_headers: bool = True) -> Any:
    """Return the body of `inputs`, a CSV file, as `{"inputs": [row, ...]}`; of a column "inputs" its cells alone.

    Without `require_headers` return numbers as an array of (rows, columns).
    """
    return _decode_csv(inputs.get_as_string(), require_headers)


def encode_csv(content: Any) -> str:
    """Return rows (dicts with the same keys, lists, or single values) as a CSV file."""
    rows = content.tolist() if hasattr(content, "tolist") else content
    rows = [rows] if isinstance(rows, dict) else list(rows)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    if rows and isinstance(rows[0], dict):
        writer.writerow(rows[0])
        rows = [list(row.values()) for row in rows]
    writer.writerows(row if isinstance(row, list | tuple) else [row] for row in rows)
    return file.getvalue()


def decode(inputs: Input, content_type: str | None, key: str | None = None, require_csv_headers: bool = True) -> Any:
    """Return the body of `inputs` decoded by its content type: the value of JSON, or a dict with "inputs".

    A CSV file becomes what `decode_csv` returns. Raises ValueError if the body is not what the content type promises.
    """
    if not content_type:
        return inputs.get_as_json(key) if inputs.get_as_bytes(key) else {"inputs": ""}
    if "application/json" in content_type:
        return inputs.get_as_json(key)
    if "text/csv" in content_type:
        return _decode_csv(inputs.get_as_string(key), require_csv_headers)
    return {"inputs": _decode(inputs, content_type, key)}


def encode(outputs: Output, prediction: Any, content_type: str | None, key: str | None = None) -> Output:
    """Add `prediction` to `outputs` in the first known form that `content_type` names; it may be an Accept header."""
    if not content_type or "application/json" in content_type or "*/*" in content_type:
        outputs.add_as_json(prediction, key)
        return outputs.add_property("Content-Type", "application/json")
    if "text/csv" in content_type:
        return outputs.add(encode_csv(prediction), key).add_property("Content-Type", "text/csv")
    if "text/plain" in content_type:
        text = prediction if isinstance(prediction, str) else None
        (outputs.add_as_json(prediction, key) if text is None else outputs.add(text, key))
        return outputs.add_property("Content-Type", "text/plain")
    if "tensor/npz" in content_type:
        return outputs.add_as_npz(prediction, key).add_property("Content-Type", "tensor/npz")
    return outputs.add_as_numpy(prediction, key).add_property("Content-Type", "tensor/ndlist")


def _decode(inputs: Input, content_type: str, key: str | None) -> Any:
    if "text/plain" in content_type:
        return [inputs.get_as_string(key)]
    if content_type.startswith("image/"):
        return inputs.get_as_image(key)
    if "tensor/npz" in content_type:
        return inputs.get_as_npz(key)
    if content_type in ("tensor/ndlist", "application/x-npy"):
        return inputs.get_as_numpy(key)
    if content_type == "application/x-www-form-urlencoded":
        return inputs.get_as_string(key)
    return inputs.get_as_bytes(key)


def _decode_csv(text: str, require_headers: bool) -> Any:
    if not require_headers:
        return _numbers(text)
    reader = csv.DictReader(io.StringIO(text))
    names = _names(reader.fieldnames or ())
    reader.fieldnames = names
    rows = list(reader)
    return {"inputs": [row["inputs"] for row in rows] if "inputs" in names else rows}


def _names(columns: Sequence[str]) -> list[str]:
    names = [name.strip() for name in columns]
    if not any(known in name.lower() for name in names for known in _HEADERS):
        raise ValueError(f"the first line of a CSV file must name its columns, one of them {', '.join(_HEADERS)}")
    return names


def _numbers(text: str) -> Any:
    with needs("numpy", "tables of numbers"):
        import numpy as np

    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    try:
        return np.array([[float(cell) for cell in row] for row in rows], dtype=np.float32)
    except ValueError as error:
        raise ValueError(
            f"a CSV file without names of columns must have equally many numbers in each line: {error}"
        ) from error
