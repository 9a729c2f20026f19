"""Reads and writes inference requests of the Open Inference Protocol: JSON, perhaps with binary tensors behind it."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from lmi_server.contract.errors import RequestError
from lmi_server.contract.protocol import Input
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.dialects import fields
from lmi_server.dialects.framing import encode

_HEADER_LENGTH = "inference-header-content-length"
_MAX_DIGITS = 12  # of a length; int() refuses very long texts
_MAX_DIMENSIONS = 64  # as many as an array of numpy has
# The codes of struct by datatype; BYTES is written element by element.
_CODES = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
_ALLOWED = ", ".join((*_CODES, "BYTES"))
# Extensions of Triton's that are not served; a request that asks for one must not be answered as if it had not.
_UNSERVED = ("shared_memory_region", "classification")


class InputTensor(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None
    parameters: dict[str, Any] = {}


class RequestedOutput(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class InferBody(msgspec.Struct):
    inputs: list[InputTensor]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[RequestedOutput] = []


class Tensor(msgspec.Struct, frozen=True):
    """A tensor: its elements in row-major order. Elements of BYTES are texts if they are UTF-8, otherwise bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Sequence[Any]


class InferRequest(msgspec.Struct, frozen=True):
    """The inputs of a request and what it says of the answer; `parameters` are for the model."""

    id: str
    inputs: tuple[Tensor, ...]
    parameters: Mapping[str, Any]
    outputs: Mapping[str, Mapping[str, Any]]
    binary: bool


def read(request: Input) -> InferRequest:
    """Read the body of an inference request. Raises RequestError."""
    header, rest = _parts(request)
    try:
        body = msgspec.json.decode(header, type=InferBody)
    except RecursionError:
        raise RequestError("the body is nested too deeply; send the elements of each tensor in one list") from None
    except ValueError as error:  # msgspec's DecodeError, and UnicodeDecodeError
        raise RequestError(f'the body cannot be read: {error}; send {{"inputs": [...]}}') from error
    parameters = dict(body.parameters)
    binary = bool(parameters.pop("binary_data_output", False))
    _refuse_unserved(output.parameters for output in body.outputs)
    outputs = {output.name: output.parameters for output in body.outputs}
    return InferRequest(body.id, tuple(_tensors(body.inputs, rest)), parameters, outputs, binary)


def _parts(request: Input) -> tuple[bytes, bytes]:
    """Return the JSON and what follows it."""
    body = request.body()
    length = request.properties.get(_HEADER_LENGTH)
    if length is None:
        return body, b""
    if not length.isdecimal() or len(length) > _MAX_DIGITS or int(length) > len(body):
        raise RequestError(f"{_HEADER_LENGTH}: {fields.show(length)} is not the length of the JSON in the body")
    return body[: int(length)], body[int(length) :]


def _refuse_unserved(parameters: Iterator[Mapping[str, Any]]) -> None:
    for values in parameters:
        for name in _UNSERVED:
            if name in values:
                raise RequestError(f"parameter {name} is not supported; send and read the tensors themselves")


def _tensors(inputs: Sequence[InputTensor], rest: bytes) -> Iterator[Tensor]:
    _refuse_unserved(tensor.parameters for tensor in inputs)
    at = 0
    for tensor in inputs:
        size = tensor.parameters.get("binary_data_size")
        _check(tensor)
        if size is None:
            yield _from_json(tensor)
            continue
        if not isinstance(size, int) or size < 0 or at + size > len(rest):
            raise RequestError(
                f"input {excerpt(tensor.name)}: binary_data_size is more than the body has behind its JSON"
            )
        yield _from_binary(tensor, rest[at : at + size])
        at += size


def _check(tensor: InputTensor) -> None:
    if tensor.datatype not in (*_CODES, "BYTES"):
        raise RequestError(
            f"input {excerpt(tensor.name)}: datatype {excerpt(tensor.datatype)} is not supported; send {_ALLOWED}"
        )
    if len(tensor.shape) > _MAX_DIMENSIONS:
        raise RequestError(f"input {excerpt(tensor.name)}: shape has more than {_MAX_DIMENSIONS} dimensions")
    if any(size < 0 for size in tensor.shape):
        raise RequestError(
            f"input {excerpt(tensor.name)}: shape {tensor.shape} is not allowed; send sizes of 0 or more"
        )


def _from_json(tensor: InputTensor) -> Tensor:
    if tensor.data is None:
        raise RequestError(f"input {excerpt(tensor.name)}: data is missing")
    data = list(_flat(tensor.name, tensor.data, len(tensor.shape)))
    kinds: tuple[type, ...] = (str,) if tensor.datatype == "BYTES" else (int, float)
    if not all(isinstance(element, kinds) for element in data):
        raise RequestError(f"input {excerpt(tensor.name)}: data has elements that are not {tensor.datatype}")
    return _tensor(tensor, data)


def _flat(name: str, data: Sequence[Any], dimensions: int) -> Iterator[Any]:
    for element in data:
        if not isinstance(element, list):
            yield element
        elif dimensions > 1:
            yield from _flat(name, element, dimensions - 1)
        else:
            raise RequestError(f"input {excerpt(name)}: data is nested more deeply than its shape")


def _from_binary(tensor: InputTensor, data: bytes) -> Tensor:
    if tensor.datatype == "BYTES":
        return _tensor(tensor, list(_elements(tensor.name, data)))
    code = _CODES[tensor.datatype]
    width = struct.calcsize(f"<{code}")
    if len(data) % width:
        raise RequestError(f"input {excerpt(tensor.name)}: {len(data)} bytes are no whole number of {tensor.datatype}")
    return _tensor(tensor, struct.unpack(f"<{len(data) // width}{code}", data))


def _elements(name: str, data: bytes) -> Iterator[str | bytes]:
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at) if at + 4 <= len(data) else (len(data),)
        at += 4
        if at + length > len(data):
            raise RequestError(f"input {excerpt(name)}: an element of BYTES is longer than the tensor")
        element = data[at : at + length]
        try:
            yield element.decode()
        except UnicodeDecodeError:
            yield element
        at += length


def _tensor(tensor: InputTensor, data: Sequence[Any]) -> Tensor:
    if math.prod(tensor.shape) != len(data):
        raise RequestError(f"input {excerpt(tensor.name)}: shape {tensor.shape} does not fit {len(data)} elements")
    return Tensor(tensor.name, tensor.datatype, tuple(tensor.shape), data)


def nest(tensor: Tensor) -> Any:
    """Return the elements as lists of the tensor's shape."""
    data: list[Any] = list(tensor.data)
    for size in reversed(tensor.shape[1:]):
        data = [data[at : at + size] for at in range(0, len(data), size)] if size else []
    return data


def answer(request: InferRequest, model: str, outputs: Sequence[Tensor]) -> tuple[list[tuple[str, str]], bytes]:
    """Return headers and body of the answer with the outputs that the request asks for. Raises RequestError."""
    known = {output.name: output for output in outputs}
    for name in request.outputs:
        if name not in known:
            raise RequestError(f"output {excerpt(name)} is not one of model {model}; ask for {', '.join(known)}")
    wanted = [output for output in outputs if not request.outputs or output.name in request.outputs]
    written, blobs = [], []
    for output in wanted:
        entry: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": list(output.shape)}
        if request.outputs.get(output.name, {}).get("binary_data", request.binary):
            blobs.append(_binary(output))
            entry["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            entry["data"] = output.data
        written.append(entry)
    identified = {"id": request.id} if request.id else {}
    header = encode({"model_name": model, **identified, "outputs": written})
    if not blobs:
        return [("content-type", "application/json")], header
    headers = [("content-type", "application/octet-stream"), (_HEADER_LENGTH, str(len(header)))]
    return headers, b"".join((header, *blobs))


def _binary(tensor: Tensor) -> bytes:
    if tensor.datatype != "BYTES":
        return struct.pack(f"<{len(tensor.data)}{_CODES[tensor.datatype]}", *tensor.data)
    encoded = [element.encode() for element in tensor.data]
    return b"".join(struct.pack("<I", len(element)) + element for element in encoded)
