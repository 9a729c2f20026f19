"""Requests to models that generate no text: the one input tensor stands for LMI's `inputs`, the answer for a tensor."""

from __future__ import annotations

from typing import Any

import msgspec

from lmi_server.contract.errors import RequestError
from lmi_server.contract.protocol import Input
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.dialects import routes
from lmi_server.dialects.framing import encode
from lmi_server.dialects.kserve.tensors import InferRequest, Tensor, answer, nest, read

OUTPUT = "output"


def as_lmi_request(request: Input) -> tuple[InferRequest, Input]:
    """Return the request as it was read, and in LMI's form. Raises RequestError."""
    infer = read(request)
    if len(infer.inputs) != 1:
        raise RequestError(f"inputs: {len(infer.inputs)} tensors were sent, and this model takes one")
    unknown = ", ".join(name for name in infer.outputs if name != OUTPUT)
    if unknown:
        raise RequestError(f"output {excerpt(unknown)} is not one of this model; ask for {OUTPUT}")
    data = nest(infer.inputs[0])
    if any(isinstance(element, bytes) for element in infer.inputs[0].data):
        raise RequestError(
            f"input {excerpt(infer.inputs[0].name)}: an element is no UTF-8; post such bytes to /invocations"
        )
    body = {"inputs": data, **({"parameters": dict(infer.parameters)} if infer.parameters else {})}
    kept = {
        name: value
        for name, value in request.properties.items()
        if name not in ("content-length", "inference-header-content-length")
    }
    properties = {**kept, "content-type": "application/json", "accept": "application/json"}
    return infer, msgspec.structs.replace(
        request, route=routes.INVOCATIONS, properties=properties, content=[("data", encode(body))]
    )


def as_tensors(infer: InferRequest, model: str, data: bytes) -> tuple[list[tuple[str, str]], bytes]:
    """Return headers and body of the answer, from LMI's answer. Raises RequestError if that is not JSON."""
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise RequestError("the model answers in a form that is no JSON; post to /invocations") from error
    if isinstance(value, dict) and len(value) == 1:  # {"predictions": [...]}
        value = next(iter(value.values()))
    return answer(infer, model, [_tensor(value if isinstance(value, list) else [value])])


def _tensor(values: list[Any]) -> Tensor:
    """Return numbers as a tensor of their shape, and anything else as BYTES: texts, and objects as JSON."""
    shape, flat = _shape(values), values
    while flat and isinstance(flat[0], list):
        flat = [element for row in flat for element in (row if isinstance(row, list) else [row])]
    kinds = {type(element) for element in flat}
    if shape is not None and kinds <= {int, float, bool} and kinds:
        datatype = "BOOL" if kinds == {bool} else "INT64" if kinds == {int} else "FP64"
        return Tensor(OUTPUT, datatype, shape, flat)
    texts = [value if isinstance(value, str) else encode(value).decode() for value in values]
    return Tensor(OUTPUT, "BYTES", (len(texts),), texts)


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the sizes of nested lists; None if they are not of one size."""
    if not isinstance(value, list):
        return ()
    inner = {_shape(element) for element in value}
    if len(inner) > 1 or None in inner:
        return None
    return (len(value), *(next(iter(inner), ()) or ()))
