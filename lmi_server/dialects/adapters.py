"""Which LoRA adapter a request asks for: one answer, by which the worker chooses weights and formatters alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from lmi_server.contract.errors import RequestError
from lmi_server.contract.protocol import Input
from lmi_server.dialects import fields
from lmi_server.dialects.base import ServedModel
from lmi_server.dialects.routes import MODEL_IN_BODY

_HEADER = "x-amzn-sagemaker-adapter-identifier"
ALIAS_HEADER = "x-amzn-sagemaker-adapter-alias"
_KEY = "adapter"  # of a query, and of SageMaker's custom attributes


def adapter_name(name: str, value: Any) -> str:
    """Return the adapter that the field `name` has as its value, also as a list of one. Raises RequestError."""
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(one, str):
        raise fields.not_allowed(name, value, "send the name of one adapter")
    return one


def requested_adapter(request: Input, body: Mapping[str, Any], served: ServedModel) -> str | None:
    """Return the adapter that header, query, body or custom attribute name, in this order; None if none does.

    `body` is that of `request`, read as JSON; {} if it is no JSON object. An empty name asks for the model without
    adapter, so that a header can override what the body says. The adapter need not be registered. Raises RequestError
    if a field of the body does not hold one name.
    """
    headers = request.properties
    for name in (headers.get(_HEADER), _in_query(request)):
        if name is not None:
            return name or None
    return next(_in_body(request.route, body, served), headers.get(_KEY)) or None


def registered_adapter(request: Input, body: Mapping[str, Any], served: ServedModel) -> str | None:
    """Return the adapter that a request asks for, as `requested_adapter` does.

    Raises RequestError if it is not registered, too. The header of the alias only changes what the message says.
    """
    name = requested_adapter(request, body, served)
    if name is not None and name not in served.adapters:
        known = f"; registered: {', '.join(sorted(served.adapters))}" if served.adapters else ""
        shown = request.properties.get(ALIAS_HEADER, name)
        raise RequestError(f"The adapter {shown} has not been registered{known}")
    return name


def with_adapter(request: Input, name: str) -> Input:
    """Return `request` with `name` in the header, which goes before every other place."""
    return msgspec.structs.replace(request, properties={**request.properties, _HEADER: name})


def _in_body(route: str, body: Mapping[str, Any], served: ServedModel) -> Iterator[str]:
    for key in ("adapters", "adapter"):
        if body.get(key) is not None:
            yield adapter_name(key, body[key])
    # `parameters` belongs to LMI's requests, `model` to OpenAI's. A body of neither form is one that only code of the
    # model or the adapter can read; it may use both.
    is_openai = route in MODEL_IN_BODY or body.get("messages") is not None
    is_lmi = not is_openai and body.get("inputs") is not None
    is_openai = is_openai or (not is_lmi and body.get("prompt") is not None)
    parameters = body.get("parameters")
    if not is_openai and isinstance(parameters, Mapping) and parameters.get("adapter_id") is not None:
        yield adapter_name("parameters.adapter_id", parameters["adapter_id"])
    # OpenAI's API has no field for adapters; clients name one as the model, as with vLLM.
    model = body.get("model")
    if not is_lmi and isinstance(model, str) and model in served.adapters:
        yield model


def _in_query(request: Input) -> str | None:
    values = [value for key, value in request.content if key == _KEY]
    return values[-1].decode(errors="replace") if values else None
