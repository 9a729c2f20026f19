"""OpenAI's embeddings: parses the body into texts, and writes an answer from vectors.

Any handler that embeds can use them. It passes the vector of each input as float32 bytes.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from lmi_server.contract.errors import RequestError
from lmi_server.dialects import fields
from lmi_server.dialects.fields import Field
from lmi_server.dialects.framing import encode

_MAX_INPUTS = 2048  # OpenAI's limit

EncodingFormat = Literal["float", "base64"]


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to embed: texts, or lists of token ids.

    `dimensions` cuts each vector to its first elements; None keeps the whole vector. `truncate_tokens` cuts longer
    inputs to so many tokens; -1 cuts to what the model can read, None refuses them. `warnings` name ignored fields.
    """

    inputs: tuple[str | tuple[int, ...], ...]
    model: str | None = None
    encoding_format: EncodingFormat = "float"
    dimensions: int | None = None
    truncate_tokens: int | None = None
    warnings: tuple[str, ...] = ()


def parse(body: Mapping[str, Any]) -> EmbeddingRequest:
    """Parse the body of a request. Raises RequestError."""
    values, unknown = fields.read_fields(body, FIELDS)
    if "inputs" not in values:
        raise RequestError("input is missing; send a string, a list of strings, or token ids")
    return EmbeddingRequest(**values, warnings=fields.unknown_warnings(unknown, FIELDS))


def inputs(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Read one input or a list of them. A text may be empty, a list may not. Raises RequestError."""
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise fields.not_allowed(name, value, "send a string, a list of strings, or token ids, with something in it")
    if len(value) > _MAX_INPUTS:
        raise fields.not_allowed(name, value, f"send at most {_MAX_INPUTS} inputs in a request")
    return tuple([_one_input(f"{name}[{index}]", item) for index, item in enumerate(value)])


def _one_input(name: str, value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise fields.not_allowed(name, value, "send a string, or a list of token ids with something in it")
    return fields.token_ids(name, value)


def _truncation(name: str, value: Any) -> int:
    size = int(_TRUNCATION(name, value))
    if size == 0:
        raise fields.not_allowed(name, value, "send the tokens to keep, or -1 for what the model takes")
    return size


_TRUNCATION = fields.integer(-1)

FIELDS = {
    "input": Field("inputs", inputs),
    "model": Field("model", fields.string),
    "encoding_format": Field("encoding_format", fields.one_of("float", "base64")),
    "dimensions": Field("dimensions", fields.integer(1)),
    "truncate_prompt_tokens": Field("truncate_tokens", _truncation),
    "user": Field(None, fields.ignored),
}


def body(model: str, vectors: Sequence[bytes], encoding_format: EncodingFormat, prompt_tokens: int) -> bytes:
    """Return the answer with `vectors`: for each input the bytes of a float32 vector in this machine's byte order.

    `model` is the name that the answer shows; `prompt_tokens` is the sum over all inputs.
    """
    write = _base64 if encoding_format == "base64" else _floats
    data = [{"object": "embedding", "index": index, "embedding": write(vector)} for index, vector in enumerate(vectors)]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return encode({"object": "list", "data": data, "model": model, "usage": usage})


def _floats(vector: bytes) -> list[float]:
    return array("f", vector).tolist()


def _base64(vector: bytes) -> str:
    """Encode a vector in little-endian order, which clients expect: OpenAI's SDK decodes it with numpy's float32."""
    if sys.byteorder == "big":
        swapped = array("f", vector)
        swapped.byteswap()
        vector = swapped.tobytes()
    return base64.b64encode(vector).decode()
