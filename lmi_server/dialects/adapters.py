"""Which LoRA adapter a request asks for: one answer, by which the worker chooses weights and formatters alike."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from lmi_server.contract.errors import RequestError
from lmi_server.contract.protocol import ADAPTER_HEADER, Input
from lmi_server.contract.texts.quoting import excerpt
from lmi_server.dialects import fields
from lmi_server.dialects.base import ServedModel
from lmi_server.dialects.optional import model_in_body
from lmi_server.dialects.routes import means_any_model

ALIAS_HEADER = "x-amzn-sagemaker-adapter-alias"
_ABSENT = msgspec.Raw(b"null")
_LONGEST_NAME = 4096  # bytes in JSON
_KEY = "adapter"  # of a query, and of SageMaker's custom attributes


def adapter_name(name: str, value: Any) -> str:
    """Return the adapter that the field `name` has as its value, also as a list of one. Raises RequestError."""
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(one, str):
        raise fields.not_allowed(name, value, "send the name of one adapter")
    return one


def requested_adapter(request: Input, body: Mapping[str, Any], served: ServedModel) -> str | None:
    """Return the adapter that header, query, body or custom attribute name, in this order; None if none does.

    `body` is the body of `request`, read as JSON; {} if it is no JSON object. An empty name asks for the model without
    adapter: so a header can override the body. The adapter need not be registered. Raises RequestError if a field of
    the body does not hold one name.
    """
    headers = request.properties
    for name in (headers.get(ADAPTER_HEADER), _in_query(request)):
        if name is not None:
            return name or None
    named = _in_body(request.route, body, served)
    return (headers.get(_KEY) if named is None else named) or None


def registered_adapter(request: Input, body: Mapping[str, Any], served: ServedModel) -> str | None:
    """Return the adapter that a request asks for, as `requested_adapter` does.

    Also raises RequestError if it is not registered. The header of the alias only changes the text of the message.
    """
    name = requested_adapter(request, body, served)
    if name is not None and name not in served.adapters:
        known = f"; registered: {', '.join(sorted(served.adapters))}" if served.adapters else ""
        shown = request.properties.get(ALIAS_HEADER, name)
        raise RequestError(f"The adapter {excerpt(shown)} has not been registered{known}")
    return name


def adapter_as_model(model: str, served: ServedModel) -> str | None:
    """Return the adapter that OpenAI's `model` names: "adapter", or "model:adapter" as with Ray Serve LLM."""
    base, _, name = model.rpartition(":")
    if base in (served.name, *served.served_names) and name in served.adapters:
        return name
    return model if model in served.adapters else None


class _AnyOther(Collection[str]):
    """Every name but the model's own: any of them may be an adapter that is not loaded yet."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(name) and name not in self._names and not means_any_model(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def naming_adapter(request: Input, served_names: Sequence[str]) -> Input:
    """Return the request to a model that loads adapters on demand, with its adapter in the header.

    What the body names as model, and is no name of the model, is an adapter. If the body cannot be read, the request is
    returned as it is, for the worker to refuse.
    """
    if ADAPTER_HEADER in request.properties:
        return request
    others = _AnyOther(frozenset(served_names))
    served = ServedModel(name=served_names[0], served_names=tuple(served_names), adapters=others)
    try:
        name = requested_adapter(request, _naming_fields(request), served)
    except (RequestError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return request
    return request if name is None else with_adapter(request, name)


class _NamingFields(msgspec.Struct):
    """What of a body may name an adapter, or says who may. The rest is read past: it may be long."""

    adapters: msgspec.Raw = _ABSENT
    adapter: msgspec.Raw = _ABSENT
    model: msgspec.Raw = _ABSENT
    parameters: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _ABSENT
    inputs: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT


class _NamingParameters(msgspec.Struct):
    adapter_id: msgspec.Raw = _ABSENT


def _naming_fields(request: Input) -> dict[str, Any]:
    """Return the fields that may hold a name, and whether the others are there. Raises RequestError."""
    found = msgspec.json.decode(fields.json_body(request), type=_NamingFields)
    named = {key: _short(getattr(found, key)) for key in ("adapters", "adapter", "model")}
    there = {key: bytes(getattr(found, key)) != _ABSENT or None for key in ("messages", "inputs", "prompt")}
    if bytes(found.parameters).startswith(b"{"):
        parameters = msgspec.json.decode(found.parameters, type=_NamingParameters)
        named["parameters"] = {"adapter_id": _short(parameters.adapter_id)}
    return {**named, **there}


def _short(value: msgspec.Raw) -> Any:
    """Return a value that may be a name. Raises RequestError if it is longer than any."""
    if len(bytes(value)) > _LONGEST_NAME:
        raise RequestError("the name of an adapter is too long")
    return msgspec.json.decode(value)


def with_adapter(request: Input, name: str) -> Input:
    """Return `request` with `name` in the header, which goes before every other place."""
    return msgspec.structs.replace(request, properties={**request.properties, ADAPTER_HEADER: name})


def _in_body(route: str, body: Mapping[str, Any], served: ServedModel) -> str | None:
    for key in ("adapters", "adapter"):
        if body.get(key) is not None:
            return adapter_name(key, body[key])
    parameters, model = body.get("parameters"), body.get("model")
    in_parameters = parameters.get("adapter_id") if isinstance(parameters, dict) else None
    if in_parameters is None and not isinstance(model, str):
        return None
    # `parameters` belongs to LMI's requests, `model` to OpenAI's. A body of neither form is one that only code of the
    # model or the adapter can read; it may use both.
    is_openai = route in model_in_body() or body.get("messages") is not None
    is_lmi = not is_openai and body.get("inputs") is not None
    is_openai = is_openai or (not is_lmi and body.get("prompt") is not None)
    if not is_openai and in_parameters is not None:
        return adapter_name("parameters.adapter_id", in_parameters)
    # OpenAI's API has no field for adapters; clients name one as the model, as with vLLM.
    return adapter_as_model(model, served) if not is_lmi and isinstance(model, str) else None


def _in_query(request: Input) -> str | None:
    named = None
    for key, value in request.content:
        if key == _KEY:
            named = value
    return None if named is None else named.decode(errors="replace")
