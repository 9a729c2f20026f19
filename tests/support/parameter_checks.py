"""Whether LMI's requests take a parameter of a library, or refuse it by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dialect_helpers import request

from lmi_server.contract.errors import RequestError
from lmi_server.contract.generation import Feature
from lmi_server.dialects import ServedModel, parse
from lmi_server.dialects.lmi import PARAMETERS

FEATURES: frozenset[Feature] = frozenset(
    {"structured_outputs", "min_tokens", "bad_words", "allowed_token_ids", "engine_extras"}
)
CAPABLE = ServedModel(name="model", features=FEATURES)


def refusal(name: str, value: Any, served: ServedModel = CAPABLE) -> str | None:
    """Return how an LMI request with this parameter is refused; None if it is taken."""
    try:
        parse(request("invocations", {"inputs": "a", "parameters": {name: value}}), served)
    except RequestError as error:
        return error.message
    return None


def samples(name: str) -> Iterator[Any]:
    """Yield values that mean something to some parameter; a reader takes or refuses each of them by name."""
    yield from (2, 0.5, True, False, "x", ["x"], [3], {"3": 1.0}, {"type": "json_object"}, {"regex": "a"})


def check_parameter(name: str) -> None:
    assert name in PARAMETERS, f"declare {name}: honoured, refused by name, or in NO_EFFECT with the reason"
    refused = [message for value in samples(name) if (message := refusal(name, value))]
    assert refused, f"{name} takes anything"
    assert all(f"parameters.{name}" in message for message in refused)
    if PARAMETERS[name].target is None:
        assert any("is not supported" in message or "is not allowed" in message for message in refused)
