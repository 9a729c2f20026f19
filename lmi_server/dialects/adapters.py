"""Which LoRA adapter a request asks for."""

from __future__ import annotations

from typing import Any

import msgspec

from lmi_server.contract.errors import RequestError
from lmi_server.contract.protocol import Input
from lmi_server.dialects import fields
from lmi_server.dialects.base import ServedModel

_HEADER = "x-amzn-sagemaker-adapter-identifier"
_ALIAS_HEADER = "x-amzn-sagemaker-adapter-alias"
_KEY = "adapter"  # of a query, and of SageMaker's custom attributes


def adapter_name(name: str, value: Any) -> str:
    """Read the name of an adapter, also as a list of one; "" is the model without adapter."""
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(one, str):
        raise fields.not_allowed(name, value, "send the name of one adapter")
    return one


def chosen_adapter(request: Input, in_body: str | None, served: ServedModel) -> str | None:
    """Return the adapter that header, query, body or custom attribute name, in this order; None for none of them.

    Raises RequestError where it is not registered. The header of the alias only changes what the message says.
    """
    headers = request.properties
    named = (headers.get(_HEADER), _in_query(request), in_body, headers.get(_KEY))
    name = next((name for name in named if name is not None), "")
    if not name:
        return None
    if name not in served.adapters:
        known = f"; registered: {', '.join(sorted(served.adapters))}" if served.adapters else ""
        raise RequestError(f"The adapter {headers.get(_ALIAS_HEADER, name)} has not been registered{known}")
    return name


def named_adapter(request: Input) -> str | None:
    """Return the adapter that a request names, before anything is checked; None where it names none."""
    headers = request.properties
    named = (headers.get(_HEADER), _in_query(request), _in_body(request.body()), headers.get(_KEY))
    return next((name for name in named if name is not None), None)


def _in_body(body: bytes) -> str | None:
    try:
        found = _decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    listed = found.adapters[0] if isinstance(found.adapters, list) and found.adapters else found.adapters
    return next((name for name in (listed, found.adapter, found.model) if isinstance(name, str)), None)


class _Body(msgspec.Struct):
    adapters: Any = None
    adapter: Any = None
    model: Any = None


_decode = msgspec.json.Decoder(_Body).decode


def _in_query(request: Input) -> str | None:
    values = [value for key, value in request.content if key == _KEY]
    return values[-1].decode(errors="replace") if values else None
